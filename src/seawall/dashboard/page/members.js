// Members of groups: what all pods see of each of them, and how strongly it is suspected over time.

import { Keyed, clean, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { amount, counted, roundUp } from "./format.js";
import { highest, levelChart, windowOf } from "./charts.js";
import { MEMBERS, linePart } from "./sections.js";
import { factsList } from "./stack.js";

const FEW = 24; // Members that are drawn before somebody asks for all.
const FEW_PODS = 6; // Pods whose own lines are open from the beginning.
const byId = (id) => document.getElementById(id);

/** What one pod sees of one member. */
function sightPart() {
  const mark = shape();
  const pod = make("span", "sight-pod");
  const state = make("span", "sight-state");
  const facts = factsList("facts inline");
  return {
    node: make("li", "sight", [mark.node, pod, state, facts.node]),
    update({ row, view }) {
      mark.set(toneOf(row.tone));
      setName(pod, view.pod.name, 60);
      setName(state, row.state, 40);
      facts.update(row.facts);
    },
  };
}

/** The state of a member in words: how many of the pods that watch it say so. */
function stateOf({ worst, sights }) {
  const state = clean(worst.row.state, 40);
  const agreeing = sights.filter((one) => one.row.state === worst.row.state).length;
  const all = sights.length;
  if (all === 1 || (agreeing === all && state === "alive")) return state;
  return `${state} by ${agreeing} of ${all} pods`;
}

/** One member of a group, as all pods see it. */
function memberPart() {
  const mark = shape();
  const name = make("span", "member-name");
  const state = make("span", "member-state");
  const chart = levelChart();
  const facts = factsList("facts inline");
  const list = make("ul", "sights");
  const keyed = new Keyed(list, sightPart);
  const line = make("summary", "member-line", [mark.node, name, state, make("span", "member-level", [chart.node]), facts.node]);
  const details = make("details", "", [line, list]);
  const node = make("li", "member", [details]);
  let sights = [];
  const showSights = () => details.open && keyed.update(sights, (one) => one.view.pod.name);
  details.addEventListener("toggle", showSights);
  return {
    node,
    update(member) {
      const { row, past, at, frame } = member.worst;
      const tone = toneOf(row.tone);
      mark.set(tone);
      setTone(node, tone);
      setName(name, member.name, 80);
      setText(state, stateOf(member));
      facts.update(row.facts);
      const now = amount(number(row.track, null));
      chart.update(at, past ?? [], frame, clean(`${member.name}: level of suspicion, now ${now} of the threshold`));
      sights = member.sights;
      showSights();
    },
  };
}

/** A group: its members, the worst first, and what each pod says of itself. */
function groupPart() {
  const mark = shape();
  const name = make("h3", "card-name");
  const state = make("span", "card-kind");
  const members = make("ul", "members");
  const keyedMembers = new Keyed(members, memberPart);
  const more = make("button", "quiet", [], { type: "button", "aria-expanded": "false" });
  const lines = make("ul", "lines");
  const keyedLines = new Keyed(lines, linePart);
  const pods = make("summary");
  const details = make("details", "group-pods", [pods, lines]);
  const node = make("article", "card group", [make("header", "card-head", [mark.node, name, state]), members, more, details]);
  let known = null;
  let all = false;
  let opened = false;
  const showMembers = () => {
    const shown = all ? known.members : known.members.slice(0, FEW);
    keyedMembers.update(shown, (member) => member.name);
    setHidden(more, known.members.length <= FEW);
    setText(more, all ? `Show the first ${FEW}` : `Show all ${known.members.length}`);
    setAttribute(more, "aria-expanded", String(all));
  };
  more.addEventListener("click", () => {
    all = !all;
    showMembers();
  });
  return {
    node,
    update(group) {
      known = group;
      const tone = group.members.length ? toneOf(group.members[0].worst.row.tone) : "off";
      mark.set(tone);
      setTone(node, tone);
      setName(name, group.name, 100);
      setText(state, countsOf(group.members));
      showMembers();
      const most = roundUp(Math.max(0, ...group.lines.map((one) => (one.past ? highest([one.past]) : 0))));
      keyedLines.update(group.lines, (one) => one.view.pod.name, most, false);
      setText(pods, `${counted(group.lines.length, "pod")} ${group.lines.length === 1 ? "watches" : "watch"} it`);
      setHidden(details, group.lines.length === 0);
      if (!opened) details.open = group.lines.length <= FEW_PODS;
      opened = true;
    },
  };
}

/** How many members are in which state, the worst first. */
function countsOf(members) {
  const counts = new Map();
  for (const { worst } of members) {
    const state = clean(worst.row.state, 40);
    counts.set(state, (counts.get(state) ?? 0) + 1);
  }
  return [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
}

const worse = (a, b) => rank(toneOf(b.row.tone)) - rank(toneOf(a.row.tone)) || number(b.row.track) - number(a.row.track);
const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Bring what pods see together: by group, then by member, the worst first. */
function groupsOf(views, pasts, now) {
  const groups = new Map();
  const group = (name) => {
    if (!groups.has(name)) groups.set(name, { name, lines: [], members: new Map() });
    return groups.get(name);
  };
  // What a pod that is gone has last seen counts only where there is no other.
  const fresh = views.filter((view) => !view.stale);
  for (const view of fresh.length ? fresh : views) {
    const rows = view.sections[MEMBERS] ?? [];
    const past = pasts.of(view.pod.name);
    const frame = windowOf(now, view.every);
    const names = rows.filter((row) => row.kind === "members").map((row) => row.name);
    for (const row of rows) {
      const sight = { row, view, past: past.rows.get(`${row.kind}/${row.name}`), at: past.at, frame };
      if (row.kind === "members") {
        group(row.name).lines.push(sight);
        continue;
      }
      const owner = names.filter((name) => row.name.startsWith(`${name}: `)).sort((a, b) => b.length - a.length)[0];
      if (owner === undefined) continue;
      const name = row.name.slice(owner.length + 2);
      const members = group(owner).members;
      if (!members.has(name)) members.set(name, { name, sights: [] });
      members.get(name).sights.push(sight);
    }
  }
  return [...groups.values()].map((one) => {
    const members = [...one.members.values()];
    for (const member of members) member.worst = [...member.sights].sort(worse)[0];
    members.sort((a, b) => rank(toneOf(b.worst.row.tone)) - rank(toneOf(a.worst.row.tone)) || byName(a.name, b.name));
    return { ...one, members };
  });
}

/** The whole part of the page. */
export function membersPart() {
  const keyed = new Keyed(byId("groups"), groupPart);
  return {
    update(message, pasts) {
      const groups = groupsOf(message.views, pasts, message.at);
      keyed.update(groups, (group) => group.name);
      setHidden(byId("members"), groups.length === 0);
    },
  };
}
