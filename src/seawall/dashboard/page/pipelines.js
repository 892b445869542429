// Pipelines: sources, stages and sinks joined by pipes; what is slow and what is broken stands out.
//
// A pipeline that several pods run is drawn once: their numbers are added up, of words the worst
// are shown. Nodes are buttons in the page's own order, pipes are drawn behind them.

import { Keyed, clean, draw, list, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { amount, counted, latency, percent, roundUp, span } from "./format.js";
import { highest, numberChart, windowOf } from "./charts.js";
import { layoutOf } from "./pipe_layout.js";
import { PIPELINES, gaugePart, linePart } from "./sections.js";
import { factsList } from "./stack.js";
import { hasLetters, showLetters } from "./work.js";

const byId = (id) => document.getElementById(id);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const text = (value, most = 200) => clean(typeof value === "string" ? value : "", most);
const SLOW = 1; // Seconds from which on a wait is worth a word.
const NEAR = 0.8; // How full a queue is that is nearly full.
const MOST_WORKERS = 24;
const KINDS = new Set(["source", "stage", "branch", "sink"]);
const COUNTS = [
  ["done", "done"],
  ["retries", "retries"],
  ["failed", "failed"],
  ["dropped", "dropped"],
  ["dead_letters", "dead letters"],
  ["refused", "refused"],
  ["deaths", "worker deaths"],
];

// What all pods run

const worse = (a, b) => rank(toneOf(b.tone)) - rank(toneOf(a.tone));
const sum = (nodes, name) => nodes.reduce((all, one) => all + Math.max(0, number(one[name])), 0);
const most = (nodes, name) => {
  const known = nodes.map((one) => number(one[name], null)).filter((one) => one !== null);
  return known.length ? Math.max(...known) : null;
};

/** What several pods count under the same names. */
function added(counts) {
  const all = new Map();
  for (const [name, value] of counts) all.set(name, (all.get(name) ?? 0) + Math.max(0, number(value)));
  return all;
}

function mergedReadings(nodes) {
  const worst = new Map();
  for (const one of nodes.flatMap((node) => list(node.readings, 16)).filter(isObject)) {
    const reading = { name: text(one.name, 80), missing: one.state !== "ok", stale: one.state === "stale", seconds: number(one.seconds), cause: text(one.cause) };
    const known = worst.get(reading.name);
    if (!known || (reading.missing && !known.missing) || (reading.missing === known.missing && reading.seconds > known.seconds)) {
      worst.set(reading.name, reading);
    }
  }
  return [...worst.values()];
}

/** One node as all pods have it. */
function mergedNode(sights) {
  const nodes = sights.map((one) => one.node);
  const worst = [...nodes].sort(worse)[0];
  const failures = added(nodes.flatMap((node) => list(node.failures, 5)).filter(Array.isArray).map(([cause, times]) => [text(cause), times]));
  const to = new Set(sights.flatMap(({ node, names }) => list(node.to, 40).map((place) => names[place])));
  return {
    name: text(worst.name, 80),
    kind: KINDS.has(worst.kind) ? worst.kind : "stage",
    tone: toneOf(worst.tone),
    state: text(worst.state),
    to: [...to].filter((name) => typeof name === "string"),
    rate: sum(nodes, "rate"),
    waiting: sum(nodes, "waiting"),
    capacity: sum(nodes, "capacity"),
    busy: sum(nodes, "busy"),
    workers: sum(nodes, "workers"),
    oldest: most(nodes, "oldest") ?? 0,
    p50: most(nodes, "p50"),
    p99: most(nodes, "p99"),
    counts: added(nodes.flatMap((node) => Object.entries(isObject(node.counts) ? node.counts : {}).slice(0, 16))),
    waitsFor: text(nodes.find((node) => node.waits_for)?.waits_for),
    failures: [...failures].sort((a, b) => b[1] - a[1]),
    atWork: sights.flatMap(({ node, pod }) => list(node.at_work, 4).filter(isObject).map((work) => ({ ...work, pod }))),
    readings: mergedReadings(nodes),
    facts: nodes.length === 1 ? worst.facts : [],
    pasts: sights.map((one) => one.past),
  };
}

/** A pipeline as all pods run it. */
function mergedPipeline({ name, lines }) {
  const drawn = lines.filter(({ row }) => isObject(row.pipes));
  const sights = new Map();
  let more = 0;
  let oldest = null;
  const slowOnes = new Set();
  for (const { row, view, past, frame } of drawn) {
    const nodes = list(row.pipes.nodes, 40).filter(isObject);
    const names = nodes.map((node) => text(node.name, 80));
    more = Math.max(more, number(row.pipes.more));
    slowOnes.add(names[row.pipes.slow]);
    const old = row.pipes.oldest;
    if (isObject(old) && (oldest === null || number(old.age) > number(oldest.age))) oldest = old;
    nodes.forEach((node, place) => {
      if (!sights.has(names[place])) sights.set(names[place], []);
      const values = past.rows.get(`pipe/${row.name}/${node.name}`);
      sights.get(names[place]).push({ node, names, pod: view.pod.name, past: { at: past.at, values, frame } });
    });
  }
  const nodes = [...sights.values()].map(mergedNode);
  const running = lines.filter(({ row }) => row.state !== "not running").length;
  const tone = lines.map(({ row }) => toneOf(row.tone)).reduce((a, b) => (rank(b) > rank(a) ? b : a));
  const worst = [...lines].sort((a, b) => worse(a.row, b.row))[0].row;
  const slow = nodes.filter((node) => slowOnes.has(node.name)).sort((a, b) => b.oldest - a.oldest)[0]?.name ?? null;
  return { name, lines, nodes, more, oldest, running, tone, state: worst.state, slow };
}

function pipelinesOf(views, pasts, now) {
  const found = new Map();
  const fresh = views.filter((view) => !view.stale);
  for (const view of fresh.length ? fresh : views) {
    for (const row of view.sections[PIPELINES] ?? []) {
      if (row.kind !== "pipeline") continue;
      if (!found.has(row.name)) found.set(row.name, { name: row.name, lines: [] });
      const past = pasts.of(view.pod.name);
      found.get(row.name).lines.push({ row, view, past, at: past.at, frame: windowOf(now, view.every) });
    }
  }
  return [...found.values()].map(mergedPipeline);
}

// In words

const fullness = (node) => (node.capacity > 0 ? Math.min(1, node.waiting / node.capacity) : 0);
const perSecond = (rate) => `${amount(rate)}/s`;

/** What is wrong with a pipeline: each a tone and a sentence. */
function notesOf(pipeline) {
  const notes = [];
  for (const node of pipeline.nodes) {
    for (const one of node.readings.filter((each) => each.missing)) {
      const stands = one.stale ? ", its last value stands in" : "";
      const why = one.cause ? `: ${one.cause}` : "";
      notes.push({ key: `r ${node.name} ${one.name}`, tone: node.tone === "bad" ? "bad" : "warn", text: `source ${one.name} has been missing for ${span(one.seconds)}${stands}${why}` });
    }
    if (node.kind === "source") {
      if (node.tone === "bad" && !node.readings.some((one) => one.missing)) notes.push({ key: `s ${node.name}`, tone: "bad", text: `source ${node.name}: ${node.state}` });
      continue;
    }
    const queue = node.waiting ? `, ${counted(node.waiting, "item waits", "items wait")} before it` : "";
    const age = node.oldest >= SLOW ? `, the first for ${span(node.oldest)}` : "";
    if (node.waitsFor) {
      notes.push({ key: `w ${node.name}`, tone: node.tone, text: `${node.kind} ${node.name} waits${queue}${age}: ${node.waitsFor}` });
    } else if (node.name === pipeline.slow) {
      notes.push({ key: `o ${node.name}`, tone: "warn", text: `${node.kind} ${node.name} is the slow one${queue}${age}` });
    }
    if (node.tone !== "ok" && / (fail|degraded)$/.test(node.state)) {
      const why = node.failures.length ? `: ${node.failures.slice(0, 3).map(([cause, times]) => `${cause} (${times})`).join(", ")}` : "";
      notes.push({ key: `f ${node.name}`, tone: node.tone, text: `${node.state} in ${node.name}${why}` });
    }
  }
  const { oldest } = pipeline;
  if (oldest !== null && number(oldest.age) >= SLOW && pipeline.running) {
    const where = oldest.stage ? ` is in ${text(oldest.stage, 80)}` : "";
    notes.push({ key: "oldest", tone: "off", text: `the oldest item${oldest.item ? ` ${text(oldest.item, 40)}` : ""}${where}, ${span(number(oldest.age))} old` });
  }
  if (pipeline.more) notes.push({ key: "more", tone: "off", text: `${counted(pipeline.more, "stage is", "stages are")} not drawn` });
  return notes;
}

/** A node for those who hear it. */
function spoken(node, pipeline) {
  const parts = [`${node.kind} ${node.name}`, node.state, perSecond(node.rate)];
  if (node.capacity) parts.push(`queue ${amount(node.waiting)} of ${amount(node.capacity)}`);
  if (node.p99 !== null) parts.push(`p99 ${latency(node.p99)}`);
  if (node.name === pipeline.slow) parts.push(`the slow one, waits ${span(node.oldest)}`);
  const dead = node.counts.get("dead_letters");
  if (dead) parts.push(counted(dead, "dead letter"));
  if (node.to.length) parts.push(`then ${node.to.join(", ")}`);
  return clean(parts.filter(Boolean).join(", "), 300);
}

// Nodes and pipes

/** One of many that a source collects: a tap on the left of it. */
function tapPart() {
  const mark = shape();
  const name = make("span", "tap-name");
  const node = make("li", "tap", [mark.node, name]);
  return {
    node,
    update({ reading, box }) {
      const tone = reading.missing ? (reading.stale ? "warn" : "bad") : "ok";
      mark.set(tone);
      setTone(node, tone);
      setName(name, reading.name, 60);
      setAttribute(node, "title", clean(reading.missing ? `${reading.name} has been missing for ${span(reading.seconds)}: ${reading.cause}` : `${reading.name} answers`));
      placeBox(node, box);
    },
  };
}

function placeBox(node, { x, y, width, height }) {
  for (const [name, value] of [["left", x], ["top", y], ["width", width], ["height", height]]) {
    const told = `${Math.round(value)}px`;
    if (node.style[name] !== told) node.style[name] = told;
  }
}

/** A source, a stage, a branch or a sink. */
function nodePart(open) {
  const mark = shape();
  const name = make("span", "pipe-name");
  const kind = make("span", "pipe-kind");
  const rate = make("span", "pipe-rate");
  const p99 = make("span", "pipe-p99");
  const gauge = gaugePart();
  const queue = make("span", "pipe-queue");
  const state = make("span", "pipe-state");
  const dead = make("span", "pipe-dead");
  const button = make("button", "pipe-node", [
    make("span", "pipe-head", [mark.node, name, dead, kind]),
    make("span", "pipe-numbers", [rate, p99]),
    make("span", "pipe-fill", [gauge.node, queue]),
    state,
  ], { type: "button", "aria-expanded": "false" });
  const node = make("li", "pipe-item", [button]);
  let key = null;
  button.addEventListener("click", () => open(key));
  return {
    node,
    update({ pipe, box }, pipeline, opened) {
      key = pipe.name;
      mark.set(pipe.tone);
      setTone(node, pipe.tone);
      setAttribute(node, "data-kind", pipe.kind);
      setAttribute(node, "data-slow", pipe.name === pipeline.slow ? "yes" : "no");
      setName(name, pipe.name, 60);
      setText(rate, perSecond(pipe.rate));
      setText(p99, pipe.p99 === null || pipe.kind === "source" ? "" : `p99 ${latency(pipe.p99)}`);
      gauge.update(pipe.capacity ? fullness(pipe) : null, pipe.name);
      setText(queue, pipe.capacity ? `${amount(pipe.waiting)} of ${amount(pipe.capacity)}` : "");
      const slow = pipe.name === pipeline.slow && !pipe.waitsFor ? `slow: ${latency(pipe.oldest)}` : "";
      setName(state, slow || pipe.state, 80);
      const count = pipe.counts.get("dead_letters") ?? 0;
      setText(dead, count ? `${amount(count)} dead` : "");
      setHidden(dead, !count);
      setText(kind, count || pipe.kind === "stage" ? "" : pipe.kind);
      setAttribute(button, "aria-label", spoken(pipe, pipeline));
      setAttribute(button, "aria-expanded", String(opened === pipe.name));
      placeBox(node, box);
    },
  };
}

/** What is wrong with a pipe: "broken", "blocked", "full" or nothing. */
function pipeState({ share, broken, blocked }) {
  if (broken) return "broken";
  return share < NEAR ? "well" : blocked ? "blocked" : "full";
}

const PACES = [0.5, 5, 50];

/** A pipe from one node to another: its bore is as full as the queue that it leads to. */
function pipePart() {
  const wall = draw("path", { class: "pipe-wall" });
  const bore = draw("path", { class: "pipe-bore" });
  const water = draw("path", { class: "pipe-water" });
  const flow = draw("path", { class: "pipe-flow" });
  const joints = draw("path", { class: "pipe-joints" });
  const label = draw("text", { class: "pipe-label", "text-anchor": "middle" });
  const node = draw("g", { class: "pipe" }, [wall, bore, water, flow, joints, label]);
  return {
    node,
    update(pipe) {
      const { path, ends, at, rate, share, small } = pipe;
      for (const one of [wall, bore, water, flow]) setAttribute(one, "d", path);
      setAttribute(node, "data-state", pipeState(pipe));
      setAttribute(node, "data-small", small ? "yes" : "no");
      setAttribute(water, "stroke-width", String(small ? 2.5 : Math.round(2 + 8 * share)));
      setAttribute(node, "data-pace", rate > 0 ? String(1 + PACES.filter((one) => rate > one).length) : "0");
      setAttribute(joints, "d", small ? "" : ends);
      setText(label, at !== null && rate !== null ? perSecond(rate) : "");
      if (at === null) return;
      setAttribute(label, "x", String(Math.round(at.x)));
      setAttribute(label, "y", String(Math.round(at.y)));
    },
  };
}

/** How many items a second go from one node to another, where that is known. */
function flowOf(from, to, nodes) {
  if (from.to.length === 1) return from.rate;
  const into = nodes.filter((node) => node.to.includes(to.name));
  return into.length === 1 ? to.rate : null;
}

// What is inside of a node

function workPart() {
  const item = make("span", "work-item");
  const since = make("span", "pipe-since");
  const waits = make("span", "pipe-waits");
  const pod = make("span", "pipe-pod");
  return {
    node: make("li", "pipe-worker", [item, since, waits, pod]),
    update({ work }, several) {
      const items = number(work.items, 1);
      setName(item, items > 1 ? `${text(work.item, 60)} and ${items - 1} more` : text(work.item, 60) || "an item", 80);
      setText(since, `for ${span(number(work.since))}`);
      setName(waits, work.waits_for ? `waits: ${text(work.waits_for)}` : "at work", 160);
      setName(pod, several ? work.pod : "", 60);
      setHidden(pod, !several);
    },
  };
}

function causePart() {
  const cause = make("span", "cause-name");
  const bar = make("span", "cause-bar", [make("span", "cause-fill")], { "aria-hidden": "true" });
  const times = make("span", "cause-times");
  return {
    node: make("li", "cause", [cause, bar, times]),
    update([name, count], all) {
      setName(cause, name, 160);
      setText(times, counted(count, "time"));
      bar.firstElementChild.style.setProperty("--share", `${Math.round((count / all) * 100)}%`);
    },
  };
}

/** Label and value of what is known of a node. */
function factsOf(node) {
  const done = node.counts.get("done") ?? 0;
  const degraded = node.counts.get("degraded") ?? 0;
  const facts = [];
  if (node.kind !== "source") facts.push(["p50", latency(node.p50)], ["p99", latency(node.p99)]);
  if (node.workers) facts.push(["workers", `${amount(node.busy)} of ${amount(node.workers)} busy`]);
  if (node.capacity) {
    facts.push(["queue", `${amount(node.waiting)} of ${amount(node.capacity)}`]);
    if (node.waiting) facts.push(["first has waited", span(node.oldest)]);
  }
  for (const [name, label] of COUNTS) if (node.counts.get(name) || (name === "done" && node.kind !== "source")) facts.push([label, amount(node.counts.get(name) ?? 0)]);
  if (degraded) facts.push(["degraded", `${amount(degraded)}, ${percent(degraded / Math.max(done, degraded))}`]);
  return [...facts, ...list(node.facts, 16)];
}

/** What is known of the node that is open. */
function detailPart(close) {
  const mark = shape();
  const title = make("h4", "pipe-title");
  const state = make("p", "pipe-detail-state");
  const letters = make("button", "quiet", ["Show its dead letters"], { type: "button" });
  const button = make("button", "quiet", ["Close"], { type: "button" });
  const chart = numberChart();
  const scale = make("span", "scale");
  const trace = make("figure", "pipe-trace", [make("figcaption", "", ["items a second", scale]), chart.node]);
  const facts = factsList("facts");
  const workers = make("ul", "pipe-workers");
  const keyedWorkers = new Keyed(workers, workPart);
  const workTitle = make("h5", "", ["At work now"]);
  const more = make("p", "muted");
  const causes = make("ul", "causes");
  const keyedCauses = new Keyed(causes, causePart);
  const causeTitle = make("h5", "", ["Failures by cause"]);
  const readings = make("ul", "pipe-readings");
  const keyedReadings = new Keyed(readings, () => notePart());
  const readingTitle = make("h5", "", ["What it collects"]);
  const node = make("section", "pipe-detail", [
    make("div", "pipe-detail-head", [mark.node, title, state, make("div", "acts", [letters, button])]),
    make("div", "pipe-detail-top", [trace, facts.node]),
    make("div", "pipe-detail-lists", [
      make("div", "pipe-detail-work", [workTitle, workers, more]),
      make("div", "pipe-detail-causes", [causeTitle, causes]),
      make("div", "pipe-detail-readings", [readingTitle, readings]),
    ]),
  ]);
  node.hidden = true;
  let shown = null;
  letters.addEventListener("click", () => showLetters(shown.pipeline, shown.stage));
  button.addEventListener("click", close);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  return {
    node,
    update(pipe, pipeline) {
      setHidden(node, pipe === null);
      if (pipe === null) return;
      shown = { pipeline: pipeline.name, stage: pipe.name };
      setHidden(letters, !pipe.counts.get("dead_letters") || !hasLetters(pipeline.name));
      mark.set(pipe.tone);
      setTone(node, pipe.tone);
      setName(title, pipe.name, 80);
      setName(state, pipe.state, 200);
      setAttribute(node, "aria-label", clean(`${pipe.kind} ${pipe.name}`));
      const { at, values, frame } = summed(pipe.pasts);
      const top = roundUp(highest([values]));
      setText(scale, `now ${perSecond(pipe.rate)}, up to ${amount(top)}`);
      chart.update(at, values, frame, top, clean(`${pipe.name}: items a second over the last ${span(frame.length)}; now ${amount(pipe.rate)}`));
      facts.update(factsOf(pipe));
      const works = pipe.atWork.map((work, place) => ({ work, place })).slice(0, MOST_WORKERS);
      const several = pipeline.lines.length > 1;
      keyedWorkers.update(works, ({ work, place }) => `${work.pod} ${place}`, several);
      for (const one of [workTitle, workers]) setHidden(one, works.length === 0);
      const left = Math.max(0, pipe.busy - works.length);
      setText(more, left ? `and ${counted(left, "more worker")}` : "");
      setHidden(more, !left);
      keyedCauses.update(pipe.failures, ([cause]) => cause, Math.max(1, ...pipe.failures.map(([, times]) => times)));
      for (const one of [causeTitle, causes]) setHidden(one, pipe.failures.length === 0);
      const collected = pipe.readings.map((one) => ({
        key: one.name,
        tone: one.missing ? (one.stale ? "warn" : "bad") : "ok",
        text: one.missing ? `${one.name}: missing for ${span(one.seconds)}${one.stale ? ", its last value stands in" : ""}${one.cause ? `, ${one.cause}` : ""}` : `${one.name}: answers`,
      }));
      keyedReadings.update(collected, (one) => one.key);
      for (const one of [readingTitle, readings]) setHidden(one, collected.length === 0);
    },
  };
}

/** The rates of all pods, added up where their samples are; of several pods the first one's times count. */
function summed(pasts) {
  const [first, ...others] = pasts;
  const values = (first.values ?? []).slice();
  for (const one of others) {
    for (let i = 1; i <= values.length; i++) {
      const more = one.values?.at(-i) ?? null;
      if (more !== null && values.at(-i) !== null) values[values.length - i] += more;
    }
  }
  return { at: first.at, values: values.length ? values : first.at.map(() => null), frame: first.frame };
}

function notePart() {
  const mark = shape();
  const words = make("span", "pipe-note-text");
  const node = make("li", "pipe-note", [mark.node, words]);
  return {
    node,
    update(note) {
      mark.set(note.tone);
      setTone(node, note.tone);
      setName(words, note.text, 300);
    },
  };
}

// The whole

function pipelinePart() {
  const mark = shape();
  const name = make("h3", "card-name");
  const state = make("span", "pipeline-state");
  const rates = make("span", "card-kind");
  const facts = factsList("facts inline");
  const svg = draw("svg", { class: "pipes", "aria-hidden": "true" });
  const taps = make("ul", "taps", [], { "aria-label": "What the sources collect" });
  const nodes = make("ol", "pipe-nodes", [], { "aria-label": "Sources, stages and sinks" });
  const plan = make("div", "pipe-plan", [svg, taps, nodes]);
  const scroll = make("div", "pipe-scroll", [plan]);
  const notes = make("ul", "pipe-notes");
  const lines = make("ul", "lines");
  const pods = make("summary");
  const podList = make("details", "group-pods", [pods, lines]);
  const keyedPipes = new Keyed(svg, pipePart);
  const keyedTaps = new Keyed(taps, tapPart);
  const keyedNodes = new Keyed(nodes, () => nodePart(toggle));
  const keyedNotes = new Keyed(notes, notePart);
  const keyedLines = new Keyed(lines, linePart);
  const detail = detailPart(() => toggle(opened));
  const node = make("article", "card pipeline", [
    make("header", "card-head", [mark.node, name, state, rates]),
    facts.node,
    scroll,
    notes,
    detail.node,
    podList,
  ]);
  let known = null;
  let opened = null;
  let width = 0;
  let layout = null;
  let shape_ = "";

  function toggle(key) {
    const closing = key === opened;
    opened = closing ? null : key;
    showNodes();
    if (closing) [...nodes.querySelectorAll(".pipe-node")].find((one) => one.querySelector(".pipe-name").title === key)?.focus();
    else detail.node.scrollIntoView({ block: "nearest" });
  }

  /** Draw it; where everything is changes only with the graph and the room there is. */
  function showNodes() {
    if (known === null || known.nodes.length === 0 || width === 0) return;
    const graph = JSON.stringify([width, known.nodes.map((one) => [one.name, one.kind, one.to, one.readings.map((each) => each.name)])]);
    if (graph !== shape_) {
      shape_ = graph;
      layout = layoutOf(known.nodes, width);
      plan.style.width = `${layout.width}px`;
      plan.style.height = `${layout.height}px`;
      setAttribute(svg, "viewBox", `0 0 ${layout.width} ${layout.height}`);
      setAttribute(node, "data-way", layout.way);
    }
    const byName = new Map(known.nodes.map((one) => [one.name, one]));
    if (!byName.has(opened)) opened = null;
    keyedNodes.update(layout.nodes.map((one) => ({ ...one, pipe: byName.get(one.name) })), (one) => one.name, known, opened);
    const reading = (one) => byName.get(one.source).readings.find((each) => each.name === one.name);
    keyedTaps.update(layout.taps.map((one) => ({ ...one, reading: reading(one) })), (one) => one.key);
    setHidden(taps, layout.taps.length === 0);
    keyedPipes.update(layout.pipes.map((one) => pipeOf(one, byName)), (one) => one.key);
    detail.update(byName.get(opened) ?? null, known);
  }

  function pipeOf(pipe, byName) {
    if (pipe.tap) {
      const source = byName.get(pipe.to);
      const one = source.readings.find((each) => each.name === pipe.tap);
      return { ...pipe, rate: one.missing ? 0 : source.rate, share: 0, broken: one.missing, small: true };
    }
    const [from, to] = [byName.get(pipe.from), byName.get(pipe.to)];
    const rate = flowOf(from, to, known.nodes);
    return { ...pipe, rate, share: fullness(to), broken: from.kind === "source" && from.tone === "bad", blocked: to.waitsFor !== "", small: false };
  }

  new ResizeObserver(([entry]) => {
    const room = Math.floor(entry.contentRect.width);
    if (room === width) return;
    width = room;
    showNodes();
  }).observe(scroll);

  return {
    node,
    update(pipeline) {
      known = pipeline;
      mark.set(pipeline.tone);
      setTone(node, pipeline.tone);
      setName(name, pipeline.name, 100);
      setName(state, pipeline.state, 120);
      const into = pipeline.nodes.filter((one) => one.kind === "source");
      const out = pipeline.nodes.filter((one) => one.kind === "sink");
      setText(rates, pipeline.running ? `${perSecond(sum(into, "rate"))} in, ${perSecond(sum(out, "rate"))} stored` : "");
      const alone = pipeline.lines.length === 1;
      facts.update(alone ? pipeline.lines[0].row.facts : []);
      setHidden(scroll, pipeline.nodes.length === 0);
      const told = notesOf(pipeline);
      keyedNotes.update(told, (one) => one.key);
      setHidden(notes, told.length === 0);
      const each = alone ? [] : pipeline.lines.map((one) => ({ ...one, past: one.past.rows.get(`pipeline/${one.row.name}`) }));
      const top = roundUp(Math.max(0, ...each.map((one) => (one.past ? highest([one.past]) : 0))));
      keyedLines.update(each, (one) => one.view.pod.name, top, false);
      setHidden(podList, alone);
      setText(pods, `${pipeline.lines.length} pods have it, ${pipeline.running} running`);
      showNodes();
    },
  };
}

/** The whole part of the page. */
export function pipelinesPart() {
  const keyed = new Keyed(byId("pipeline-list"), pipelinePart);
  return {
    update(message, pasts) {
      const pipelines = pipelinesOf(message.views, pasts, message.at);
      setHidden(byId("pipelines"), pipelines.length === 0);
      keyed.update(pipelines, (one) => one.name);
    },
  };
}
