// What an operator may do: ask first, send with the token, tell how it went.

import { Keyed, clean, list, make, setAttribute, setHidden, setName, setText } from "./dom.js";

let token = null;
const byId = (id) => document.getElementById(id);

async function session() {
  const answer = await fetch("session", { credentials: "same-origin", cache: "no-store" });
  if (!answer.ok) throw new Error(`no session (${answer.status})`);
  token = String((await answer.json()).token ?? "");
}

function send(route, body) {
  return fetch(route, {
    method: "POST",
    credentials: "same-origin",
    headers: { "Content-Type": "application/json", "X-Seawall-Token": token },
    body: JSON.stringify(body),
  });
}

/** Post to a route of this dashboard with the token; the answer, or an Error that says why not. */
export async function post(route, body) {
  if (token === null) await session();
  let answer = await send(route, body);
  if (answer.status === 403) {
    // The token may be of an earlier process: once more with a new one.
    await session();
    answer = await send(route, body);
  }
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  throw new Error(clean(said.detail ?? said.title ?? `refused (${answer.status})`, 300));
}

let fading = 0;

/** Tell how something went. */
export function tell(text, tone = "ok") {
  const result = byId("result");
  result.dataset.tone = tone;
  result.dataset.shown = "yes";
  setText(result, "");
  setText(result, clean(text, 300));
  clearTimeout(fading);
  fading = setTimeout(() => {
    result.dataset.shown = "no";
    setText(result, "");
  }, 8000);
}

/** Ask; true if it is confirmed. */
export function confirmed(title, text, yes) {
  const dialog = byId("confirm");
  if (dialog.open) return Promise.resolve(false);
  setText(byId("confirm-title"), clean(title, 200));
  setText(byId("confirm-text"), clean(text, 400));
  setText(byId("confirm-yes"), yes);
  return new Promise((resolve) => {
    const once = new AbortController();
    let answer = false;
    const on = (node, type, then) => node.addEventListener(type, then, { signal: once.signal });
    on(byId("confirm-yes"), "click", () => {
      answer = true;
      dialog.close();
    });
    on(byId("confirm-no"), "click", () => dialog.close());
    on(dialog, "close", () => {
      once.abort();
      resolve(answer);
    });
    dialog.showModal();
    byId("confirm-no").focus();
  });
}

async function act(body, title, text, yes) {
  if (!(await confirmed(title, text, yes))) return false;
  try {
    const said = await post("act", body);
    tell(said.done ?? "Done.");
    return true;
  } catch (error) {
    tell(`Not done: ${error.message}`, "bad");
    return false;
  }
}

const EXPLAINED = {
  isolate: ["Isolate", "All calls are refused until it is closed again."],
  close: ["Close", "Calls go through again, whatever has happened."],
};

function actButton(name, getTarget) {
  const [label, text] = EXPLAINED[name];
  const button = make("button", name === "isolate" ? "danger" : "", [label], { type: "button" });
  button.addEventListener("click", () => {
    const { pod, guard, layer, title, shared, keyInput } = getTarget();
    const key = keyInput === null ? null : keyInput.value.trim();
    if (key === "") {
      tell("This breaker has a state for each key: write which.", "bad");
      keyInput.focus();
      return;
    }
    const where = shared ? "on all pods, which share it" : `on ${pod}`;
    act(
      { pod, guard, layer, act: name, key, changes: {} },
      `${label} the ${title} of ${guard}${key === null ? "" : `, key ${key}`}?`,
      `${text} It takes effect ${where}.`,
      label,
    );
  });
  return {
    node: button,
    update() {
      const { pod, guard, title } = getTarget();
      setAttribute(button, "aria-label", clean(`${label} ${title} of ${guard} on ${pod}`));
    },
  };
}

function changeForm(change, getTarget) {
  const input = make("input", "", [], {
    type: change.kind === "number" ? "number" : "text",
    autocomplete: "off",
    ...(change.kind === "number" ? { step: "any", inputmode: "decimal" } : { maxlength: "200" }),
  });
  const name = make("span", "change-name");
  const apply = make("button", "", ["Apply"], { type: "submit" });
  const form = make("form", "change", [make("label", "", [name, input]), apply]);
  let known = "";
  let kind = change.kind;
  const touched = () => input.value !== known;
  const show = () => {
    apply.disabled = !touched();
  };
  input.addEventListener("input", show);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { pod, guard, layer, title, shared } = getTarget();
    const value = kind === "number" ? input.valueAsNumber : input.value;
    if (!touched()) return;
    if (kind === "number" && !Number.isFinite(value)) {
      tell(`Write a number for ${change.name}.`, "bad");
      input.focus();
      return;
    }
    const done = await act(
      { pod, guard, layer, act: "change", key: null, changes: { [change.name]: value } },
      `Change ${change.name} of ${guard}?`,
      `${title}: ${change.name} from ${known || "nothing"} to ${input.value}, on ${pod}.${shared ? " Other pods keep theirs." : ""}`,
      "Change",
    );
    if (done) known = input.value;
    show();
  });
  return {
    node: form,
    update(now) {
      const { guard, title, pod } = getTarget();
      setName(name, now.name, 60);
      kind = now.kind;
      const value = clean(now.value, 200);
      // What somebody is typing is left alone.
      if (!touched() && input.value !== value) input.value = value;
      known = value;
      setAttribute(input, "aria-label", clean(`${now.name} of ${title}, ${guard} on ${pod}`));
      setAttribute(apply, "aria-label", clean(`Apply ${now.name} of ${title}, ${guard} on ${pod}`));
      show();
    },
  };
}

/** Whether a layer is a breaker with a state for each key: it tells how many it knows. */
export function isKeyed(layer) {
  return layer.policy === "breaker" && list(layer.facts, 40).some((fact) => fact?.[0] === "keys");
}

/** The controls of one layer; hidden from who may not act. */
export function layerControls() {
  let target = null;
  const getTarget = () => target;
  const keyInput = make("input", "", [], { type: "text", autocomplete: "off", maxlength: "200" });
  const keyLabel = make("label", "key", [make("span", "change-name", ["key"]), keyInput]);
  const buttons = make("div", "acts");
  const changes = make("div", "changes");
  const node = make("div", "controls", [keyLabel, buttons, changes]);
  const keyedActs = new Keyed(buttons, (name) => actButton(name, getTarget));
  const keyedChanges = new Keyed(changes, (change) => changeForm(change, getTarget));
  return {
    node,
    update(layer, index, { pod, guard, operable }) {
      const keyed = isKeyed(layer);
      const title = clean(layer.title, 60);
      const shared = layer.sharing === "shared";
      target = { pod, guard, layer: index, title, shared, keyInput: keyed ? keyInput : null };
      const acts = operable ? list(layer.acts, 8).filter((name) => Object.hasOwn(EXPLAINED, name)) : [];
      const settings = operable ? list(layer.changes, 20).filter((one) => one && one.name) : [];
      keyedActs.update(acts, (name) => name);
      keyedChanges.update(settings, (one) => `${one.name} ${one.kind}`);
      setHidden(keyLabel, !keyed || acts.length === 0);
      setHidden(node, acts.length + settings.length === 0);
    },
  };
}
