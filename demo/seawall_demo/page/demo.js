// What the demo shows beside the dashboard: the control strip, and both sides next to each other.
//
// Fills <section id="extra"> from `message.extra`; see DemoDashboard. Keys from 1 press the
// buttons, 0 mends everything.

import { Keyed, clean, draw, list, make, number, setAttribute, setHidden, setText, setTone } from "./dom.js";
import { amount, latency, percent, roundUp } from "./format.js";

const WIDTH = 720;
const HEIGHT = 100;
const KEEP = 90; // Reports that are drawn, one a second.
const OUTCOMES = ["good", "degraded", "limited", "error"];
const CLASSES = { good: "succeeded", degraded: "degraded", limited: "rejected", error: "failed" };
const TITLES = { protected: "With Seawall", unprotected: "Without" };
const ABOUT = {
  protected: "deadlines, retry budget, shared breaker, limits, load shedding, fallback",
  unprotected: "the same service: its client's own timeout, three more tries",
};

const section = document.getElementById("extra");
const told = make("p", "demo-told muted", [], { role: "status", "aria-live": "polite" });
const buttons = make("div", "demo-buttons", [], { role: "group", "aria-label": "Break something" });
const sides = make("div", "demo-sides");
const note = make("p", "muted demo-note");
let switches = [];

// The control strip

async function control(name, on) {
  try {
    const said = await window.seawall.post("control", { switch: name, on });
    setText(told, clean(said.done, 200));
  } catch (error) {
    setText(told, `Not done: ${clean(error.message, 200)}`);
  }
}

function press(one) {
  if (one.able !== true) return;
  // What is shown changes with the next message; until then the button is waiting.
  const part = keyed.parts.get(one.name);
  setAttribute(part.node, "data-waiting", "yes");
  control(one.name, one.on !== true).finally(() => part.node.removeAttribute("data-waiting"));
}

const keyed = new Keyed(buttons, (first) => {
  const key = make("kbd", "", []);
  const title = make("span", "demo-title");
  const state = make("span", "demo-state");
  const node = make("button", "demo-switch", [key, title, state], { type: "button", "data-switch": clean(first.name, 20) });
  let now = first;
  node.addEventListener("click", () => press(now));
  return {
    node,
    update(one, index) {
      now = one;
      const on = one.on === true;
      setText(key, String(index.get(one.name)));
      setText(title, clean(one.title, 40));
      setText(state, one.able !== true ? "not here" : on ? "on" : "off");
      setAttribute(node, "aria-pressed", String(on));
      setAttribute(node, "title", clean(one.does, 200));
      setTone(node, on ? "bad" : "off");
      if (node.disabled !== (one.able !== true)) node.disabled = one.able !== true;
    },
  };
});

const well = make("button", "demo-well", [make("kbd", "", ["0"]), make("span", "demo-title", ["All well"])], {
  type: "button",
  "data-switch": "well",
  title: "Mend everything",
});
well.addEventListener("click", () => control("well", true));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.defaultPrevented) return;
  const typing = event.target instanceof HTMLElement && event.target.closest("input, textarea, select, [contenteditable]");
  if (typing || document.querySelector("dialog[open]")) return;
  if (event.key === "0") control("well", true);
  else if (/^[1-9]$/.test(event.key) && switches[event.key - 1]) press(switches[event.key - 1]);
  else return;
  event.preventDefault();
});

// Both sides

function chart(label) {
  return draw("svg", {
    class: "chart",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
}

/** A path through what is known, the newest at the right; with `ground`, an area. */
function path(values, most, ground) {
  const step = WIDTH / (KEEP - 1);
  const points = [];
  values.forEach((value, index) => {
    if (value === null) return;
    const x = WIDTH - (values.length - 1 - index) * step;
    points.push(`${x.toFixed(1)} ${(HEIGHT - (Math.min(value, most) / most) * (HEIGHT - 4)).toFixed(1)}`);
  });
  if (points.length < 2) return "";
  const line = `M${points.join("L")}`;
  return ground ? `${line}V${HEIGHT}H${points[0].split(" ")[0]}Z` : line;
}

function outcomesChart() {
  const paths = OUTCOMES.map((name) => draw("path", { class: `area ${CLASSES[name]}` }));
  const node = chart("Outcomes");
  node.append(...[...paths].reverse());
  return {
    node,
    update(past, label) {
      const sums = past.map((one) => (number(one.requests) > 0 ? 0 : null));
      OUTCOMES.forEach((name, which) => {
        past.forEach((one, i) => {
          if (sums[i] !== null) sums[i] += number(one[name]);
        });
        paths[which].setAttribute("d", path(sums, 1, true));
      });
      setAttribute(node, "aria-label", label);
    },
  };
}

function latencyChart() {
  const under = draw("path", { class: "area p99-area" });
  const p99 = draw("path", { class: "line p99" });
  const p50 = draw("path", { class: "line p50" });
  const node = chart("Latency");
  node.append(under, p99, p50);
  return {
    node,
    update(past, most, label) {
      const of = (name) => past.map((one) => number(one[name], null));
      under.setAttribute("d", path(of("p99"), most, true));
      p99.setAttribute("d", path(of("p99"), most, false));
      p50.setAttribute("d", path(of("p50"), most, false));
      setAttribute(node, "aria-label", label);
    },
  };
}

function fact(label) {
  const value = make("dd", "demo-number", ["\u2013"]);
  const node = make("div", "demo-fact", [make("dt", "", [label]), value]);
  return { node, value };
}

function figure(node, caption) {
  const right = make("span", "scale");
  return { node: make("figure", "", [make("figcaption", "", [make("span", "", [caption]), right]), node]), right };
}

function errorTone(share) {
  if (share === null) return "off";
  return share >= 0.05 ? "bad" : share >= 0.01 ? "warn" : "ok";
}

const keyedSides = new Keyed(sides, (side) => {
  const facts = {
    errors: fact("errors"),
    p99: fact("p99"),
    p50: fact("p50"),
    good: fact("good answers/s"),
    degraded: fact("degraded"),
    limited: fact("over their limit"),
    premium: fact("premium served"),
    free: fact("free served"),
    waiting: fact("waiting now"),
  };
  for (const [name, one] of Object.entries(facts)) one.value.dataset.fact = name;
  const outcomes = outcomesChart();
  const times = latencyChart();
  const first = figure(outcomes.node, "how requests end");
  const second = figure(times.node, "p50 and p99");
  const node = make(
    "article",
    "demo-side card",
    [
      make("h3", "", [TITLES[side] ?? clean(side, 40)]),
      make("p", "muted", [ABOUT[side] ?? ""]),
      make("dl", "demo-facts", Object.values(facts).map((one) => one.node)),
      make("div", "demo-charts", [first.node, second.node]),
    ],
    { "data-side": clean(side, 20) },
  );
  return {
    node,
    update(_side, now, past, most) {
      const told = now[side] ?? {};
      const share = (name) => (number(told.requests) > 0 ? number(told[name], null) : null);
      const asPercent = (value) => (value === null ? "\u2013" : percent(value));
      const errors = share("error");
      setTone(node, errorTone(errors));
      setTone(facts.errors.value, errorTone(errors));
      setText(facts.errors.value, asPercent(errors));
      setTone(facts.p99.value, number(told.p99) >= 1 ? "bad" : "ok");
      setText(facts.p99.value, latency(number(told.p99, null)));
      setText(facts.p50.value, latency(number(told.p50, null)));
      setText(facts.good.value, `${amount(number(told.good_rate))} of ${amount(number(told.rate))}`);
      setText(facts.degraded.value, asPercent(share("degraded")));
      setText(facts.limited.value, asPercent(share("limited")));
      setText(facts.premium.value, asPercent(number(told.premium, null)));
      setText(facts.free.value, asPercent(number(told.free, null)));
      setText(facts.waiting.value, amount(number(told.waiting)));
      const own = past.map((one) => one[side] ?? {});
      outcomes.update(own, `Errors now ${asPercent(errors)}, over the last ${KEEP} seconds`);
      times.update(own, most, `p99 now ${latency(number(told.p99, null))}`);
      setText(first.right, "0 to 100 %");
      setText(second.right, `0 to ${latency(most)}`);
    },
  };
});

function legend() {
  const sample = (name) =>
    make("span", "legend-one", [
      draw("svg", { viewBox: "0 0 16 16", class: "swatch", "aria-hidden": "true" }, [
        draw("rect", { x: 0, y: 2, width: 16, height: 12, class: `area ${CLASSES[name]}` }),
      ]),
      { good: "good", degraded: "degraded: with less in it", limited: "over the user's limit", error: "error" }[name],
    ]);
  return make("div", "legend demo-legend", OUTCOMES.map(sample), { role: "group", "aria-label": "Legend" });
}

const outcomesLegend = legend();

function build() {
  section.append(
    make("div", "section-head", [make("h2", "", ["Break something"], { id: "demo-title" }), told]),
    make("div", "demo-strip", [buttons, well]),
    sides,
    outcomesLegend,
    note,
  );
  setAttribute(section, "aria-labelledby", "demo-title");
}

build();
window.seawall.subscribe((message) => {
  const extra = message.extra;
  setHidden(section, !extra);
  if (!extra) return;
  switches = list(extra.switches, 9).filter((one) => one && typeof one.name === "string");
  keyed.update(switches, (one) => one.name, new Map(switches.map((one, index) => [one.name, index + 1])));
  setText(note, clean(extra.note, 400));
  const past = list(extra.past, KEEP).filter((one) => one && typeof one === "object");
  const names = list(extra.sides, 4).map((side) => clean(side, 20));
  // One scale for both: side by side, heights mean the same.
  const highest = past.flatMap((one) => names.map((side) => number(one[side]?.p99)));
  const most = roundUp(Math.max(0.2, ...highest));
  setHidden(sides, names.length === 0);
  setHidden(outcomesLegend, names.length === 0);
  keyedSides.update(names, (side) => side, extra.now ?? {}, past, most);
});
