// The guards: a band for each name, and in it the pods side by side.

import { Keyed, clean, isScrolling, list, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { amount, asOf, counted, latency, percent, roundUp, span } from "./format.js";
import { fillLegend, highest, latencyChart, outcomesChart, statesChart, windowOf } from "./charts.js";
import { callRate, Hours, mostCalls, OUTCOMES } from "./past.js";
import { stackPart } from "./stack.js";

const LATENCIES = ["p50", "p95", "p99"];

// Only charts near the screen are drawn, and a large page has cells only in bands near the screen.
// Thousands of cells would take all of the time that scrolling needs.
const LARGE = 120; // Cells from which on a page is large.
const page = { large: false };
const near = new WeakMap();
const redraw = new WeakMap();
const watching = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      near.set(entry.target, entry.isIntersecting);
      if (entry.isIntersecting) drawSoon(entry.target);
    }
  },
  { rootMargin: "60% 0px", scrollMargin: "0px 30%" },
);

// A band gets its cells within a screen of what is seen, and loses them three screens away.
const bandsOfNodes = new WeakMap();
const coming = new IntersectionObserver(
  (entries) => entries.forEach((one) => one.isIntersecting && bandsOfNodes.get(one.target)?.approach()),
  { rootMargin: "100% 0px" },
);
const leaving = new IntersectionObserver(
  (entries) => entries.forEach((one) => one.isIntersecting || bandsOfNodes.get(one.target)?.leave()),
  { rootMargin: "300% 0px" },
);

// Cells are drawn in slices, those near the screen first: a frame has 16 ms for all there is to do.
const SLICE = 4; // Milliseconds of a frame; one cell while the page is scrolled.
const waiting = { near: new Set(), far: new Set() };
let drawing = false;

function drawSoon(node) {
  const isNear = near.get(node) === true;
  waiting[isNear ? "near" : "far"].add(node);
  if (isNear) waiting.far.delete(node);
  if (!drawing) requestAnimationFrame(drawOn);
  drawing = true;
}

function drawSlice() {
  const until = performance.now() + (isScrolling() ? 0.5 : SLICE);
  for (const nodes of [waiting.near, waiting.far]) {
    for (const node of nodes) {
      if (performance.now() >= until) break;
      nodes.delete(node);
      redraw.get(node)?.();
    }
  }
}

function drawOn() {
  drawSlice();
  drawing = waiting.near.size + waiting.far.size > 0;
  if (drawing) requestAnimationFrame(drawOn);
}

function figure(className, title, chart, below = []) {
  const scale = make("span", "scale");
  return {
    scale,
    node: make("figure", className, [
      make("figcaption", "", [make("span", "figure-title", [title]), scale]),
      chart.node,
      ...below,
    ]),
  };
}

function numbers(names) {
  const values = new Map();
  const parts = names.map((name) => {
    const value = make("dd");
    values.set(name, value);
    return make("div", name, [make("dt", "", [name]), value]);
  });
  return { node: make("dl", "numbers", parts), set: (name, text) => setText(values.get(name), text) };
}

/** What a cell shows. */
function cellContent(node) {
  const mark = shape();
  const pod = make("h4");
  const stale = make("span", "tag stale");
  const state = make("span", "state-word");
  const also = make("span", "also");
  const lastError = make("p", "last-error");
  const strip = statesChart();
  const stripFigure = figure("strip", "breaker", strip);
  const outcomes = outcomesChart();
  const rates = numbers(OUTCOMES);
  const outcomesFigure = figure("outcomes", "calls a second", outcomes, [rates.node]);
  const latencies = latencyChart();
  const quantiles = numbers(LATENCIES);
  const latencyFigure = figure("latency", "latency", latencies, [quantiles.node]);
  const stack = stackPart();
  node.append(
    make("div", "cell-in", [
      make("header", "cell-head", [pod, stale, make("span", "state-of", [mark.node, state]), also]),
      lastError,
      make("div", "charts", [stripFigure.node, outcomesFigure.node, latencyFigure.node]),
      stack.node,
    ]),
  );

  function drawCharts({ guard, past, at, frame }, tops) {
    const over = `over the last ${span(frame.length)}`;
    setText(outcomesFigure.scale, `to ${amount(tops.calls)}`);
    setText(latencyFigure.scale, `to ${latency(tops.seconds)}`);
    strip.update(at, past.breaker, frame);
    const told = OUTCOMES.map((name) => `${amount(number(guard.rates?.[name]))} ${name}`).join(", ");
    outcomes.update(at, past, frame, tops.calls, `Calls a second ${over}; now ${told}`);
    const now = `p50 ${latency(guard.p50)}, p99 ${latency(guard.p99)}`;
    latencies.update(at, past, frame, tops.seconds, `Latency ${over}; now ${now}`);
  }

  return function drawCell(one, topsOf, alone) {
    const { guard, view } = one;
    const tone = toneOf(guard.tone);
    const operable = view.operable && one.operator;
    mark.set(tone);
    setTone(node, tone);
    setName(pod, view.pod.name, 80);
    setAttribute(pod, "class", alone ? "hidden-text" : "pod-name");
    setHidden(stale, !view.stale);
    if (view.stale) setText(stale, asOf(view, one.now));
    setAttribute(node, "data-stale", view.stale ? "yes" : "no");
    setName(state, wordOf(guard), 60);
    const retries = number(guard.rates?.retries);
    const parts = [`${percent(number(guard.error_ratio))} errors`];
    if (retries > 0) parts.push(`${amount(retries)} retries/s`);
    setText(also, parts.join(" · "));
    setHidden(lastError, !guard.last_error);
    setName(lastError, guard.last_error ? `last error: ${guard.last_error}` : "", 220);
    for (const name of OUTCOMES) rates.set(name, amount(number(guard.rates?.[name])));
    for (const name of LATENCIES) quantiles.set(name, latency(guard[name]));
    setHidden(stripFigure.node, one.past.breaker.every((known) => known === null));
    stack.update(guard, { pod: view.pod.name, guard: guard.name, operable });
    if (near.get(node) === true) drawCharts(one, topsOf());
  };
}

/** One guard on one pod. */
function cellPart() {
  const node = make("article", "cell");
  let drawCell = null;
  let before = null;
  let last = null;
  watching.observe(node);
  redraw.set(node, () => {
    if (last === null) return;
    if (drawCell === null) {
      drawCell = cellContent(node);
      node.parentElement?.setAttribute("data-drawn", "");
    }
    drawCell(...last);
  });
  return {
    node,
    close() {
      watching.unobserve(node);
      redraw.delete(node);
      for (const nodes of Object.values(waiting)) nodes.delete(node);
    },
    update(one, topsOf, alone) {
      const { guard, view } = one;
      last = [one, topsOf, alone];
      const operable = view.operable && one.operator;
      const now = [guard.tone, guard.state, guard.breaker, view.stale, operable, alone, one.frame.length].join(" ");
      if (near.get(node) !== true && (now === before || (page.large && drawCell === null))) return;
      before = now;
      drawSoon(node);
    },
  };
}

/** How a guard is, in a word or two. */
const wordOf = (guard) => clean(guard.state, 60);

function bandSummary(cells) {
  const worst = cells.reduce((a, b) => (rank(toneOf(b.guard.tone)) > rank(toneOf(a.guard.tone)) ? b : a));
  const word = wordOf(worst.guard);
  const same = cells.filter((one) => wordOf(one.guard) === word).length;
  const where = cells.length === 1 ? "" : same === cells.length ? " on all pods" : ` on ${same} of ${cells.length} pods`;
  const calls = cells.reduce((sum, one) => sum + callRate(one.guard.rates), 0);
  return { tone: toneOf(worst.guard.tone), state: word + where, calls };
}

/** One guard on all pods that have it. */
function bandPart(first) {
  const mark = shape();
  const name = make("h3", "band-name");
  const edge = make("span", "tag", ["edge"]);
  const state = make("span", "band-state");
  const calls = make("span", "band-calls");
  const cells = make("div", "cells");
  const keyed = new Keyed(cells, cellPart);
  const node = make(
    "section",
    "band",
    [make("header", "band-head", [mark.node, name, edge, state, calls]), cells],
    { tabindex: "-1" },
  );
  node.dataset.guard = clean(first.name, 80);
  let isNear = false;
  let used = false; // Somebody scrolled the pods: they stay as they are.
  let last = null;
  cells.addEventListener("scroll", () => (used = true), { passive: true, once: true });

  function updateCells() {
    // One scale for all pods: what is side by side is to be compared. Made when it is needed.
    let tops = null;
    const topsOf = () =>
      (tops ??= {
        calls: roundUp(Math.max(...last.cells.map((one) => mostCalls(one.past)))),
        seconds: roundUp(Math.max(...last.cells.map((one) => Math.max(highest([one.past.p99]), highest([one.past.p50]))))),
      });
    keyed.update(last.cells, (one) => one.view.pod.name, topsOf, last.alone);
  }

  bandsOfNodes.set(node, {
    approach() {
      if (isNear) return;
      isNear = true;
      updateCells();
    },
    leave() {
      const open = used || node.contains(document.activeElement) || node.querySelector("details[open]");
      if (!isNear || !page.large || open) return;
      isNear = false;
      cells.style.setProperty("--height", `${cells.offsetHeight}px`);
      cells.removeAttribute("data-drawn");
      keyed.update([], () => "");
    },
  });
  coming.observe(node);
  leaving.observe(node);
  return {
    node,
    near: () => [...cells.children].some((cell) => near.get(cell) === true),
    close() {
      coming.unobserve(node);
      leaving.unobserve(node);
      keyed.update([], () => "");
    },
    update(band) {
      last = band;
      const { tone, state: word, calls: sum } = bandSummary(band.cells);
      mark.set(tone);
      setTone(node, tone);
      setName(name, band.name, 120);
      setAttribute(node, "aria-label", clean(`${band.name}: ${word}`));
      setHidden(edge, !band.cells.some((one) => one.guard.edge));
      setText(state, word);
      setText(calls, `${amount(sum)} calls/s`);
      setAttribute(node, "data-pods", band.cells.length > 1 ? "several" : "one");
      isNear ||= !page.large;
      if (isNear) updateCells();
    },
  };
}

function jumpPart(band, openBand) {
  const mark = shape();
  const name = make("span", "jump-name");
  const button = make("button", "jump-one", [mark.node, name], { type: "button" });
  button.addEventListener("click", () => openBand(band.name));
  return {
    node: button,
    update(now) {
      const { tone, state } = bandSummary(now.cells);
      mark.set(tone);
      setTone(button, tone);
      setName(name, now.name, 60);
      setAttribute(button, "aria-label", clean(`${now.name}: ${state}`));
    },
  };
}

// Seconds for which a guard that was broken stays at the front: one that flaps does not jump.
const BROKEN_FOR = 30;

/** Notes which guards are broken, or were a moment ago. */
class Broken {
  constructor() {
    this.seen = new Map();
  }

  note(bands, now) {
    for (const band of bands) {
      if (band.cells.some((one) => toneOf(one.guard.tone) === "bad")) this.seen.set(band.name, now);
    }
    for (const [name, at] of this.seen) if (Math.abs(now - at) > BROKEN_FOR) this.seen.delete(name);
  }

  has(name) {
    return this.seen.has(name);
  }
}

function overHours(hours, guard, pod, now) {
  const { at, past, step } = hours.of(guard, pod);
  return { at, past, frame: { now, every: step, from: now - hours.span, length: hours.span } };
}

/** Bring the views of pods together by guard: broken ones, those named `first`, edges, by name. */
function bandsOf(views, pasts, hours, now, operator, first, broken) {
  const bands = new Map();
  for (const view of views) {
    const past = pasts.of(view.pod.name);
    const frame = windowOf(now, view.every);
    for (const guard of view.guards) {
      const known = past.guards.get(guard.name);
      if (!known) continue;
      if (!bands.has(guard.name)) bands.set(guard.name, { name: guard.name, edge: guard.edge, cells: [] });
      const drawn = hours.span ? overHours(hours, guard.name, view.pod.name, now) : { past: known, at: past.at, frame };
      bands.get(guard.name).cells.push({ guard, view, ...drawn, now, operator });
    }
  }
  broken.note(bands.values(), now);
  const rankOf = (band) => (broken.has(band.name) ? 0 : first.includes(band.name) ? 1 : band.edge ? 2 : 3);
  const sorted = [...bands.values()].sort((a, b) => rankOf(a) - rankOf(b) || (a.name < b.name ? -1 : 1));
  for (const band of sorted) band.alone = views.length === 1;
  return sorted;
}

/** The whole part of the page. */
export function guardsPart() {
  const byId = (id) => document.getElementById(id);
  const filter = byId("filter");
  const none = byId("no-guards");
  const keyed = new Keyed(byId("bands"), bandPart);
  const jump = new Keyed(byId("jump"), (band) => jumpPart(band, openBand));
  const broken = new Broken();
  const hours = new Hours();
  let shownLast = null;
  let bands = [];
  fillLegend(byId("legend"));

  function openBand(name) {
    const part = keyed.parts.get(name);
    part?.node.focus({ preventScroll: true });
    part?.node.scrollIntoView({ block: "start" });
  }

  function applyFilter() {
    const wanted = filter.value.trim().toLowerCase();
    let left = 0;
    for (const band of bands) {
      const hidden = !band.name.toLowerCase().includes(wanted);
      left += hidden ? 0 : 1;
      setHidden(keyed.parts.get(band.name).node, hidden);
      setHidden(jump.parts.get(band.name).node, hidden);
    }
    setHidden(none, left > 0);
    setText(
      none,
      bands.length
        ? "No guard has that in its name."
        : "No guards yet. Make one in the service, Guard(\"vendor\", ...) or Guard.standard(\"vendor\", ...), and it is drawn here with its stack.",
    );
  }

  filter.addEventListener("input", applyFilter);

  function show() {
    const [message, pasts] = shownLast;
    bands = bandsOf(message.views, pasts, hours, message.at, message.operator !== null, list(message.extra?.first), broken);
    page.large = bands.reduce((sum, band) => sum + band.cells.length, 0) > LARGE;
    keyed.update(bands, (band) => band.name);
    drawSlice(); // All of a small page.
    jump.update(bands, (band) => band.name);
  }

  /** Ask for the hours of what is near the screen; a page that is not seen asks for nothing. */
  function refreshHours() {
    if (document.hidden) return;
    const wanted = bands.filter((band) => keyed.parts.get(band.name)?.near()).map((band) => band.name);
    hours.refresh(wanted, () => {
      show();
      refreshHours();
    });
  }

  for (const button of byId("range").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      for (const other of byId("range").querySelectorAll("button")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      hours.choose(Number(button.dataset.span));
      if (shownLast) show();
      refreshHours();
    });
  }

  return {
    /** The bands that are not filtered out, in order. */
    shown: () => [...byId("bands").children].filter((node) => !node.hidden),
    update(message, pasts) {
      shownLast = [message, pasts];
      show();
      refreshHours();
      setHidden(byId("range"), bands.length === 0);
      setHidden(byId("jump"), bands.length < 2);
      setHidden(filter.parentElement, bands.length < 2);
      setHidden(byId("legend"), bands.length === 0);
      setText(byId("guards-title"), bands.length ? counted(bands.length, "guard") : "Guards");
      applyFilter();
    },
  };
}

