// What is wrong now and since when, said plainly; the pods; and what happened.

import { Keyed, clean, list, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf } from "./dom.js";
import { amount, asOf, counted, moment, percent, span } from "./format.js";
import { OUTCOMES } from "./past.js";

const MOST_HAPPENINGS = 60;
const YOUNG = 600; // Seconds for which it is told that a pod is new.
const byId = (id) => document.getElementById(id);

function troublePart() {
  const mark = shape();
  const where = make("span", "trouble-where");
  const what = make("span", "trouble-what");
  const pods = make("span", "trouble-pods");
  const since = make("span", "trouble-since");
  const advice = make("p", "trouble-advice");
  const node = make("li", "trouble", [
    mark.node,
    make("div", "trouble-text", [make("p", "", [where, " ", what, " ", pods]), advice]),
    since,
  ]);
  return {
    node,
    update(trouble, now, several) {
      mark.set(trouble.tone);
      setTone(node, trouble.tone);
      setName(where, trouble.where, 80);
      setName(what, trouble.what, 300);
      const named = several ? trouble.pods.map((pod) => clean(pod, 60)).join(", ") : "";
      setText(pods, named && `on ${named}`);
      setText(since, `for ${span(now - trouble.since)}, since ${moment(trouble.since, now)}`);
      setName(advice, trouble.advice, 400);
      setHidden(advice, !trouble.advice);
    },
  };
}

/** The troubles of all pods, the same one once, the worst first and then the oldest. */
export function troublesOf(views, now) {
  const found = new Map();
  for (const view of views) {
    const name = view.pod.name;
    // One that is gone says so among its troubles; of one that is only late nobody has said it.
    if (view.stale && view.gone === null) {
      const what = "This pod has not been heard of: what is shown of it is old.";
      const advice = "It may have stopped, or be cut off from the store.";
      found.set(`stale ${name}`, { id: `stale ${name}`, tone: "warn", where: name, what, advice, since: view.heardAt, pods: [] });
      continue; // What was wrong with it then is not known to be wrong now.
    }
    for (const one of view.troubles) {
      const id = `${one.id} ${one.where}`;
      const known = found.get(id);
      const tone = toneOf(one.tone);
      const since = number(one.since, now);
      if (!known) {
        found.set(id, { id, tone, where: one.where, what: one.what, advice: one.advice, since, pods: [name] });
        continue;
      }
      known.pods.push(name);
      known.since = Math.min(known.since, since);
      if (rank(tone) > rank(known.tone)) Object.assign(known, { tone, what: one.what, advice: one.advice });
    }
  }
  return [...found.values()].sort((a, b) => rank(b.tone) - rank(a.tone) || a.since - b.since);
}

/** The verdict in a few words. */
export function verdictOf(troubles, connected, any) {
  if (!connected) return { tone: "off", words: "Not live: this page has lost its connection" };
  if (!any) return { tone: "off", words: "No pod has told anything yet" };
  const wrong = troubles.filter((one) => one.tone === "bad").length;
  const look = troubles.length - wrong;
  if (!troubles.length) return { tone: "ok", words: "All is well" };
  const things = wrong ? `${counted(wrong, "thing")} ${wrong === 1 ? "is" : "are"} wrong` : "";
  if (!wrong) return { tone: "warn", words: `${counted(look, "thing")} to look at` };
  return { tone: "bad", words: look ? `${things}, ${look} to look at` : things };
}

function podPart() {
  const mark = shape();
  const name = make("span", "pod-chip-name");
  const facts = make("span", "pod-chip-facts");
  const node = make("li", "pod-chip", [mark.node, name, facts]);
  return {
    node,
    update(view, now) {
      const worst = view.troubles.reduce((tone, one) => (rank(toneOf(one.tone)) > rank(tone) ? toneOf(one.tone) : tone), "ok");
      const tone = view.stale ? "off" : worst;
      mark.set(tone);
      setTone(node, tone);
      setName(name, view.pod.name, 60);
      const up = number(view.pod.up_seconds);
      const parts = [view.stale ? asOf(view, now) : `load ${percent(number(view.load))}`];
      if (up < YOUNG && !view.stale) parts.push(`up ${span(up)}`);
      setText(facts, parts.join(" · "));
      const told = `up ${span(up)}, host ${clean(view.pod.host, 80)}, process ${clean(view.pod.pid, 20)}, seawall ${clean(view.pod.version, 40)}`;
      setAttribute(node, "title", told);
    },
  };
}

/** The verdict, its troubles and the pods. */
export function verdictPart() {
  const keyed = new Keyed(byId("troubles"), troublePart);
  const pods = new Keyed(byId("pods"), podPart);
  return {
    update(message, now, connected) {
      const troubles = troublesOf(message.views, now);
      const { tone, words } = verdictOf(troubles, connected, message.views.length > 0);
      setTone(byId("verdict"), tone);
      setAttribute(byId("verdict-use"), "href", `#shape-${tone}`);
      // Told aloud by screen readers: changed only when the words are others.
      setText(byId("verdict-title"), words);
      const guards = new Set(message.views.flatMap((view) => view.guards.map((guard) => guard.name)));
      const all = Math.max(...message.views.map((view) => number(view.all_guards)), guards.size);
      const told = all > guards.size ? `${guards.size} of ${counted(all, "guard")}` : counted(guards.size, "guard");
      const calls = message.views.reduce(
        (all, view) => all + view.guards.reduce((sum, guard) => sum + OUTCOMES.reduce((one, name) => one + number(guard.rates?.[name]), 0), 0),
        0,
      );
      const load = message.views.reduce((sum, view) => sum + number(view.load), 0) / (message.views.length || 1);
      setText(
        byId("verdict-text"),
        connected
          ? [counted(message.views.length, "pod"), told, `${amount(calls)} calls/s`, `load ${percent(load)}`].join(" · ")
          : `What is shown is from ${moment(message.at, now)}, ${span(now - message.at)} ago.`,
      );
      keyed.update(troubles, (one) => one.id, now, message.views.length > 1);
      setHidden(byId("troubles"), troubles.length === 0);
      pods.update(message.views, (view) => view.pod.name, now);
      const title = clean(message.title, 80) || "Seawall";
      setText(byId("title"), title);
      const wanted = tone === "ok" ? title : `${words} \u00b7 ${title}`;
      if (document.title !== wanted) document.title = wanted;
    },
  };
}

function happeningPart(happening) {
  const mark = shape();
  const at = make("time", "happening-at");
  const where = make("span", "happening-where");
  const what = make("span", "happening-what");
  const pod = make("span", "happening-pod");
  mark.set(toneOf(happening.tone));
  setName(where, happening.where, 80);
  setName(what, happening.what, 300);
  setName(pod, happening.pod, 60);
  return {
    node: make("li", "happening", [at, mark.node, where, what, pod]),
    update(one, now, several) {
      setText(at, moment(one.at, now));
      setAttribute(at, "title", `${span(now - one.at)} ago`);
      setHidden(pod, !several);
    },
  };
}

/** What happened on all pods, the latest first. */
export function happeningsPart() {
  const keyed = new Keyed(byId("happenings"), happeningPart);
  return {
    update(message, now) {
      const all = [];
      for (const view of message.views) {
        const seen = new Map();
        for (const one of list(view.happenings, 400)) {
          const text = `${view.pod.name} ${one.at} ${one.where} ${one.what}`;
          const again = (seen.get(text) ?? 0) + 1;
          seen.set(text, again);
          all.push({ ...one, at: number(one.at), pod: view.pod.name, key: `${text} ${again}` });
        }
      }
      all.sort((a, b) => b.at - a.at);
      keyed.update(all.slice(0, MOST_HAPPENINGS), (one) => one.key, now, message.views.length > 1);
      setHidden(byId("no-happenings"), all.length > 0);
    },
  };
}
