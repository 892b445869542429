// Everything that is no guard: limits, queues, outboxes, pools... A card for each, a line for each pod.

import { Keyed, clean, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { amount, percent, roundUp, span } from "./format.js";
import { highest, numberChart, windowOf } from "./charts.js";
import { factsList } from "./stack.js";

/** The sections that have a part of the page of their own. */
export const MEMBERS = "Members";
export const PIPELINES = "Pipelines";
const ELSEWHERE = new Set([MEMBERS, PIPELINES]);

/** How full something is. */
export function gaugePart() {
  const fill = make("span", "gauge-fill");
  const node = make("span", "gauge", [fill], { role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" });
  return {
    node,
    update(value, name) {
      const known = value !== null;
      setHidden(node, !known);
      if (!known) return;
      const share = Math.round(Math.min(1, Math.max(0, value)) * 1000) / 10;
      fill.style.setProperty("--share", `${share}%`);
      setAttribute(node, "aria-valuenow", String(Math.round(share)));
      setAttribute(node, "aria-label", clean(`${name}: how full`));
      setAttribute(node, "title", `${percent(value)} used`);
      setAttribute(node, "data-full", share >= 100 ? "yes" : share >= 80 ? "near" : "no");
    },
  };
}

/** One thing on one pod. */
export function linePart() {
  const mark = shape();
  const pod = make("span", "line-pod");
  const state = make("span", "line-state");
  const gauge = gaugePart();
  const chart = numberChart();
  const trace = make("span", "line-trace", [chart.node]);
  const facts = factsList("facts inline");
  const node = make("li", "line", [
    make("div", "line-head", [mark.node, pod, state, gauge.node, trace]),
    facts.node,
  ]);
  return {
    node,
    update({ row, view, past, at, frame }, most, alone) {
      const tone = toneOf(row.tone);
      mark.set(tone);
      setTone(node, tone);
      setName(pod, view.pod.name, 60);
      setHidden(pod, alone);
      setAttribute(node, "data-stale", view.stale ? "yes" : "no");
      setName(state, row.state, 80);
      gauge.update(number(row.gauge, null), row.name);
      facts.update(row.facts);
      const tracked = past !== undefined && past.some((one) => one !== null);
      setHidden(trace, !tracked);
      if (!tracked) return;
      const now = amount(number(row.track, null));
      setAttribute(trace, "title", `now ${now}; drawn up to ${amount(most)}`);
      chart.update(at, past, frame, most, clean(`${row.name} over the last ${span(frame.length)}; now ${now}`));
    },
  };
}

/** One thing, on all pods that have it. */
function cardPart() {
  const mark = shape();
  const name = make("h3", "card-name");
  const kind = make("span", "card-kind");
  const lines = make("ul", "lines");
  const keyed = new Keyed(lines, linePart);
  const node = make("article", "card", [make("header", "card-head", [mark.node, name, kind]), lines]);
  return {
    node,
    update(card) {
      const worst = card.lines.reduce((a, b) => (rank(toneOf(b.row.tone)) > rank(toneOf(a.row.tone)) ? b : a));
      const tone = toneOf(worst.row.tone);
      mark.set(tone);
      setTone(node, tone);
      setName(name, card.name, 100);
      setText(kind, clean(card.kind, 40).replaceAll("_", " "));
      const most = roundUp(Math.max(...card.lines.map((one) => (one.past ? highest([one.past]) : 0))));
      keyed.update(card.lines, (one) => one.view.pod.name, most, card.alone);
    },
  };
}

function sectionPart(first) {
  const title = make("h2", "", [clean(first.title, 60)]);
  const cards = make("div", "cards");
  const keyed = new Keyed(cards, cardPart);
  const node = make("section", "", [make("div", "section-head", [title]), cards]);
  node.setAttribute("aria-label", clean(first.title, 60));
  return {
    node,
    update(section) {
      keyed.update(section.cards.values(), (card) => `${card.kind}/${card.name}`);
    },
  };
}

/** Bring the rows of pods together: by title, then by kind and name. */
function sectionsOf(views, pasts, now) {
  const sections = new Map();
  for (const view of views) {
    const past = pasts.of(view.pod.name);
    const frame = windowOf(now, view.every);
    for (const [title, rows] of Object.entries(view.sections)) {
      if (ELSEWHERE.has(title)) continue;
      for (const row of rows) {
        if (!sections.has(title)) sections.set(title, { title, cards: new Map() });
        const cards = sections.get(title).cards;
        const key = `${row.kind}/${row.name}`;
        if (!cards.has(key)) cards.set(key, { kind: row.kind, name: row.name, lines: [], alone: views.length === 1 });
        cards.get(key).lines.push({ row, view, past: past.rows.get(key), at: past.at, frame });
      }
    }
  }
  return [...sections.values()];
}

/** The whole part of the page. */
export function sectionsPart() {
  const keyed = new Keyed(document.getElementById("sections"), sectionPart);
  return {
    update(message, pasts) {
      keyed.update(sectionsOf(message.views, pasts, message.at), (section) => section.title);
    },
  };
}
