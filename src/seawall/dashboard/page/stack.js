// A guard's stack, drawn as one: a line on which the calls go in, from the outermost policy to the
// dependency, and where they stop now.

import { Keyed, clean, list, make, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { isKeyed, layerControls } from "./operate.js";
import { proposalPart } from "./proposals.js";

const GATES = new Set(["breaker", "rate_limit", "bulkhead", "thread_bulkhead", "shed", "adaptive_limit"]);

/** Whether calls stop at a layer now: "all", "some" or "". What is only in shadow stops none. */
function stopsAt(layer) {
  const tone = toneOf(layer.tone);
  const state = clean(layer.state, 60).toLowerCase();
  if (tone === "off" || state.includes("shadow")) return "";
  if (layer.policy === "breaker") {
    if (/^(open|isolated)/.test(state)) return isKeyed(layer) ? "some" : "all";
    if (/^half/.test(state)) return "some";
  }
  return tone === "bad" && GATES.has(layer.policy) ? "some" : "";
}

const STOPS = { all: "calls stop here", some: "some calls stop here" };

/** Label and value, ready to be shown. */
export function factsList(className) {
  const node = make("dl", className);
  const keyed = new Keyed(node, () => {
    const label = make("dt");
    const value = make("dd");
    return {
      node: make("div", "", [label, value]),
      update([name, what]) {
        setName(label, name, 60);
        setName(value, what, 160);
      },
    };
  });
  return {
    node,
    update(facts) {
      const known = list(facts, 40).filter((one) => Array.isArray(one) && one.length === 2);
      keyed.update(known, ([name]) => String(name));
      setHidden(node, known.length === 0);
    },
  };
}

function layerPart() {
  const mark = shape();
  const title = make("span", "layer-title");
  const settings = make("span", "layer-settings");
  const sharing = make("span", "sharing");
  const state = make("span", "layer-state");
  const stop = make("span", "layer-stop");
  const summary = make("summary", "", [
    make("span", "node", [mark.node]),
    title,
    settings,
    stop,
    make("span", "layer-end", [sharing, state]),
  ]);
  const more = make("div", "layer-more");
  const details = make("details", "", [summary, more]);
  const node = make("li", "layer", [details]);
  let inside = null;
  let last = null;

  // What is inside is made when it is opened, and costs nothing while it is closed.
  function updateInside(opening) {
    if (!(details.open || opening === true) || last === null) return;
    if (inside === null) {
      inside = { facts: factsList("facts"), proposal: proposalPart(), controls: layerControls() };
      more.append(inside.facts.node, inside.proposal.node, inside.controls.node);
    }
    inside.facts.update(last.layer.facts);
    inside.proposal.update(last.index, last.layers, last.target);
    inside.controls.update(last.layer, last.index, last.target);
  }

  details.addEventListener("toggle", updateInside);
  // The toggle is told later, and who is quick with Tab would be past what is not there yet.
  summary.addEventListener("click", () => updateInside(true));
  return {
    node,
    update({ layer, index }, target, stopIndex, layers) {
      last = { layer, index, layers, target };
      const tone = toneOf(layer.tone);
      const stops = index === stopIndex ? "all" : stopsAt(layer) === "some" ? "some" : "";
      mark.set(tone);
      setTone(node, tone);
      setName(title, layer.title, 60);
      setName(settings, layer.settings, 200);
      setName(state, layer.state, 60);
      setHidden(state, !layer.state);
      setText(stop, STOPS[stops] ?? "");
      setHidden(stop, !stops);
      setAttribute(node, "data-stops", stops);
      setAttribute(node, "data-reached", stopIndex >= 0 && index > stopIndex ? "no" : "yes");
      const shared = layer.sharing ? clean(layer.sharing, 40) : "";
      setText(sharing, shared === "shared" || !shared ? shared : `${shared}: store lost`);
      setTone(sharing, shared === "shared" ? "ok" : "warn");
      setHidden(sharing, !shared);
      updateInside();
    },
  };
}

/** The whole stack; `target` says whose it is, and who may act on it. */
export function stackPart() {
  const layers = make("ol", "layers");
  const keyed = new Keyed(layers, layerPart);
  const end = make("span", "end-name");
  const reach = make("span", "end-reach");
  const last = make("p", "stack-end", [make("span", "node"), end, reach]);
  const node = make("div", "stack", [
    make("p", "stack-start", [make("span", "node"), "calls go in"]),
    layers,
    last,
  ]);
  return {
    node,
    update(guard, target) {
      const stack = list(guard.stack, 40).map((layer, index) => ({ layer, index }));
      const stopIndex = stack.findIndex(({ layer }) => stopsAt(layer) === "all");
      keyed.update(stack, ({ layer, index }) => `${index} ${layer.policy}`, target, stopIndex, stack.length);
      setName(end, guard.edge ? "this service" : guard.name, 60);
      setText(reach, stopIndex >= 0 ? "not reached" : "");
      setAttribute(last, "data-reached", stopIndex >= 0 ? "no" : "yes");
    },
  };
}
