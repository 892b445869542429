// The small charts: outcomes, latency, a breaker's states, one number. Time runs to the right.
//
// A chart's width is the window of time; a span without samples is left empty. Paths are made of
// whole numbers in the chart's own units, which keeps a redraw cheap.

import { draw, make, setAttribute, setText } from "./dom.js";
import { KEEP, OUTCOMES, piled } from "./past.js";
import { amount, latency, moment, span, stateWord } from "./format.js";

const WIDTH = 720;
const HEIGHT = 100;
const STRIP = 16;
const GAP = 2.6; // Samples that may be missing before it is drawn as a gap, in turns.

/** The span of time that charts show, ending now. */
export function windowOf(now, every) {
  const length = KEEP * every;
  return { now, every, from: now - length, length };
}

const drawn = new WeakMap();

/** What a chart shows at a share of its width (0 to 1), in lines of text; null where nothing is. */
export function readAt(node, share) {
  const { at, frame, lines } = drawn.get(node) ?? {};
  if (!at?.length) return null;
  const wanted = frame.from + share * frame.length;
  let best = 0;
  for (let i = 1; i < at.length; i++) {
    if (Math.abs(at[i] - wanted) < Math.abs(at[best] - wanted)) best = i;
  }
  if (Math.abs(at[best] - wanted) > GAP * frame.every) return null;
  return [moment(at[best], frame.now), ...lines(best)].join("\n");
}

function chart(height, label) {
  const node = draw("svg", {
    class: "chart",
    viewBox: `0 0 ${WIDTH} ${height}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  return node;
}

/** Where each sample is drawn: a list of x, or null before the window; and where a gap is. */
function places(at, frame) {
  const scale = WIDTH / frame.length;
  const xs = new Array(at.length);
  const breaks = new Array(at.length);
  for (let i = 0; i < at.length; i++) {
    xs[i] = Math.min(WIDTH, Math.round((at[i] - frame.from) * scale));
    breaks[i] = i === 0 || at[i] - at[i - 1] > GAP * frame.every;
  }
  return { xs, breaks };
}

/** A path over what is known, down to the ground (an area) or not (a line). */
function path({ xs, breaks }, valueAt, most, area) {
  let made = "";
  let last = -1;
  let first = 0;
  const end = () => {
    if (last < 0) return;
    // One sample alone is still seen: as wide as a sample is.
    if (last === first) made += `h4`;
    if (area) made += `V${HEIGHT}H${xs[first]}Z`;
  };
  for (let i = 0; i < xs.length; i++) {
    const value = xs[i] < 0 ? null : valueAt(i);
    if (value === null) {
      end();
      last = -1;
      continue;
    }
    const y = Math.max(0, Math.round(HEIGHT - (value / most) * (HEIGHT - 4)));
    if (last < 0 || breaks[i]) {
      end();
      first = i;
      made += area ? `M${xs[i]} ${HEIGHT}V${y}` : `M${xs[i]} ${y}`;
    } else {
      made += `L${xs[i]} ${y}`;
    }
    last = i;
  }
  end();
  return made;
}

/** The largest that a list of lists adds up to, in the window. */
export function highest(lists) {
  let most = 0;
  const length = lists[0]?.length ?? 0;
  for (let i = 0; i < length; i++) {
    let sum = 0;
    for (const one of lists) sum += one[i] ?? 0;
    if (sum > most) most = sum;
  }
  return most;
}

/** Calls a second by how they ended, piled up. */
export function outcomesChart() {
  const node = chart(HEIGHT, "Outcomes");
  const paths = OUTCOMES.map((name) => draw("path", { class: `area ${name}` }));
  node.append(...[...paths].reverse());
  return {
    node,
    update(at, past, frame, most, label) {
      const placed = places(at, frame);
      const piles = at.map((_, i) => piled(past, i));
      paths.forEach((one, which) => {
        if (which > 0) for (const pile of piles) if (pile) pile[which] += pile[which - 1];
        one.setAttribute("d", path(placed, (i) => piles[i]?.[which] ?? null, most, true));
      });
      const told = (i) => OUTCOMES.map((name) => `${amount(past[name][i])} ${name}`);
      drawn.set(node, { at, frame, lines: told });
      setAttribute(node, "aria-label", label);
    },
  };
}

/** p50 and p99. */
export function latencyChart() {
  const node = chart(HEIGHT, "Latency");
  const under = draw("path", { class: "area p99-area" });
  const p99 = draw("path", { class: "line p99" });
  const p50 = draw("path", { class: "line p50" });
  node.append(under, p99, p50);
  return {
    node,
    update(at, past, frame, most, label) {
      const placed = places(at, frame);
      under.setAttribute("d", path(placed, (i) => past.p99[i], most, true));
      p99.setAttribute("d", path(placed, (i) => past.p99[i], most, false));
      p50.setAttribute("d", path(placed, (i) => past.p50[i], most, false));
      const told = (i) => [`p50 ${latency(past.p50[i])}`, `p99 ${latency(past.p99[i])}`];
      drawn.set(node, { at, frame, lines: told });
      setAttribute(node, "aria-label", label);
    },
  };
}

/** One number over time. */
export function numberChart() {
  const node = chart(HEIGHT, "The last minutes");
  const under = draw("path", { class: "area track-area" });
  const line = draw("path", { class: "line track" });
  node.append(under, line);
  return {
    node,
    update(at, values, frame, most, label) {
      const placed = places(at, frame);
      under.setAttribute("d", path(placed, (i) => values[i], most, true));
      line.setAttribute("d", path(placed, (i) => values[i], most, false));
      drawn.set(node, { at, frame, lines: (i) => [amount(values[i])] });
      setAttribute(node, "aria-label", label);
    },
  };
}

const THRESHOLD = HEIGHT - (HEIGHT - 4) / 2;

/** How strongly a member is suspected over time; it is suspected above the line in the middle. */
export function levelChart() {
  const node = chart(HEIGHT, "Level of suspicion");
  const under = draw("path", { class: "area level-area" });
  const line = draw("path", { class: "line track" });
  const limit = draw("line", { class: "threshold", x1: 0, x2: WIDTH, y1: THRESHOLD, y2: THRESHOLD });
  node.append(under, limit, line);
  return {
    node,
    update(at, values, frame, label) {
      const placed = places(at, frame);
      const level = (i) => (values[i] === null || values[i] === undefined ? null : Math.min(2, values[i]));
      under.setAttribute("d", path(placed, level, 2, true));
      line.setAttribute("d", path(placed, level, 2, false));
      drawn.set(node, { at, frame, lines: (i) => [`${amount(values[i])} of the threshold`] });
      setAttribute(node, "aria-label", label);
    },
  };
}

// How high a state stands: it can be read without its colour.
const STATES = {
  closed: [10, 6],
  half_open: [5, 11],
  open: [0, 16],
  isolated: [0, 16],
};

function runs(at, states, frame) {
  const found = [];
  for (let i = 0; i < at.length; i++) {
    if (at[i] < frame.from) continue;
    const state = Object.hasOwn(STATES, states[i] ?? "") ? states[i] : null;
    const last = found[found.length - 1];
    const near = last && at[i] - last.to <= GAP * frame.every;
    if (near) last.to = at[i];
    if (!near || last.state !== state) found.push({ state, from: at[i], to: at[i] });
  }
  return found.filter((run) => run.state !== null);
}

/** The states of a breaker: a strip of segments, each with its span in its title. */
export function statesChart() {
  const node = chart(STRIP, "Breaker states");
  const rects = [];
  return {
    node,
    update(at, states, frame) {
      const found = runs(at, states, frame);
      const scale = WIDTH / frame.length;
      found.forEach((run, index) => {
        if (!rects[index]) {
          const title = draw("title");
          const rect = draw("rect", {}, [title]);
          rects[index] = { rect, title };
          node.append(rect);
        }
        const { rect, title } = rects[index];
        const [y, height] = STATES[run.state];
        const x = Math.max(0, (run.from - frame.from) * scale);
        const to = Math.min(WIDTH, (run.to - frame.from) * scale);
        rect.setAttribute("x", x.toFixed(1));
        rect.setAttribute("width", Math.max(3, to - x).toFixed(1));
        setAttribute(rect, "y", String(y));
        setAttribute(rect, "height", String(height));
        setAttribute(rect, "class", `state ${run.state}`);
        if (run.state === "isolated") setAttribute(rect, "fill", "url(#hatch)");
        else rect.removeAttribute("fill");
        setText(title, `${stateWord(run.state)} for ${span(run.to - run.from + frame.every)}, from ${moment(run.from, frame.now)}`);
      });
      for (const { rect } of rects.splice(found.length)) rect.remove();
      const last = found[found.length - 1];
      const opened = found.filter((run) => run.state === "open").length;
      const times = opened === 1 ? "once" : `${opened} times`;
      setAttribute(
        node,
        "aria-label",
        last
          ? `Breaker over the last ${span(frame.length)}: now ${stateWord(last.state)}, open ${times}`
          : "Breaker: nothing known yet",
      );
    },
  };
}

/** What the colours and heights mean. */
export function fillLegend(node) {
  const sample = (name, state) => {
    const [y, height] = STATES[state] ?? [2, 12];
    const rect = draw("rect", { x: 0, y, width: 16, height, class: state ? `state ${state}` : `area ${name}` });
    if (state === "isolated") rect.setAttribute("fill", "url(#hatch)");
    return make("span", "legend-one", [
      draw("svg", { viewBox: "0 0 16 16", class: "swatch", "aria-hidden": "true" }, [rect]),
      name,
    ]);
  };
  node.append(
    make("span", "legend-title", ["Breaker"]),
    ...Object.keys(STATES).map((state) => sample(stateWord(state), state)),
    make("span", "legend-title", ["Calls a second"]),
    ...OUTCOMES.map((name) => sample(name, null)),
  );
}
