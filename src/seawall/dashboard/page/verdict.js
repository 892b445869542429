// What is wrong now, by cause, and since when; the pods; and what happened.

import { Keyed, clean, make, number, rank, setAttribute, setHidden, setName, setText, setTone, shape, toneOf, webAddress } from "./dom.js";
import { amount, asOf, counted, moment, percent, span } from "./format.js";
import { callRate } from "./past.js";

const YOUNG = 600; // Seconds for which it is told that a pod is new.
const byId = (id) => document.getElementById(id);

/** A link to a runbook or a trace, hidden while there is none. */
function linkPart(label) {
  const node = make("a", "link", [label], { target: "_blank", rel: "noopener noreferrer" });
  node.hidden = true;
  return {
    node,
    update(address) {
      const usable = webAddress(address);
      setHidden(node, usable === null);
      if (usable !== null) setAttribute(node, "href", usable);
    },
  };
}

/** A trouble on all pods that have it, in one line. */
function lineOf(tag) {
  const where = make("span", "trouble-where");
  const what = make("span", "trouble-what");
  const pods = make("span", "trouble-pods");
  const runbook = linkPart("runbook");
  const trace = linkPart("trace");
  return {
    node: make(tag, "", [where, " ", what, " ", pods, " ", runbook.node, " ", trace.node]),
    update(one, several, cause = null) {
      // What a consequence has in common with its cause is not said again.
      setHidden(where, one.where === cause?.where);
      setName(where, one.where, 80);
      setName(what, one.what, 300);
      const same = cause !== null && cause.pods.join() === one.pods.join();
      setText(pods, several && !same ? onPods(one.pods, several) : "");
      runbook.update(one.runbook);
      trace.update(one.trace_link);
    },
  };
}

/** Which pods: all of them, their names, or the first of many. */
function onPods(pods, several) {
  if (pods.length === several) return `on all ${several} pods`;
  const named = pods.slice(0, 4).map((pod) => clean(pod, 60)).join(", ");
  return `on ${named}${pods.length > 4 ? ` and ${pods.length - 4} more` : ""}`;
}

function consequencePart() {
  const mark = shape();
  const line = lineOf("span");
  return {
    node: make("li", "consequence", [mark.node, line.node]),
    update(one, several, cause) {
      mark.set(toneOf(one.tone));
      line.update(one, several, cause);
    },
  };
}

/** A problem with what follows from it below. */
function troublePart() {
  const mark = shape();
  const line = lineOf("p");
  const since = make("span", "trouble-since");
  const advice = make("p", "trouble-advice");
  const follows = make("ul", "consequences", [], { "aria-label": "What follows from it" });
  const keyed = new Keyed(follows, consequencePart);
  const node = make("li", "trouble", [
    mark.node,
    make("div", "trouble-text", [line.node, advice, follows]),
    since,
  ]);
  return {
    node,
    update(problem, now, several) {
      const tone = worstOf(problem);
      mark.set(tone);
      setTone(node, tone);
      line.update(problem, several);
      setText(since, `for ${span(now - problem.since)}, since ${moment(problem.since, now)}`);
      setName(advice, problem.advice, 400);
      setHidden(advice, !problem.advice);
      keyed.update(problem.consequences, idOf, several, problem);
      setHidden(follows, problem.consequences.length === 0);
    },
  };
}

const idOf = (one) => `${one.id} ${one.where}`;

/** How bad a problem is with what follows from it. */
function worstOf(problem) {
  const tones = [problem, ...problem.consequences].map((one) => toneOf(one.tone));
  return tones.reduce((a, b) => (rank(b) > rank(a) ? b : a));
}

/** The verdict, as long as the page is connected. */
function verdictOf(message, connected) {
  if (!connected) return { tone: "off", words: "Not live: this page has lost its connection" };
  return { tone: toneOf(message.verdict.tone), words: clean(message.verdict.words, 120) };
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
      const { tone, words } = verdictOf(message, connected);
      const several = message.views.length > 1 ? message.views.length : 0;
      setTone(byId("verdict"), tone);
      setAttribute(byId("verdict-use"), "href", `#shape-${tone}`);
      // Told aloud by screen readers: changed only when the words are others.
      setText(byId("verdict-title"), words);
      const guards = new Set(message.views.flatMap((view) => view.guards.map((guard) => guard.name)));
      const all = Math.max(...message.views.map((view) => number(view.all_guards)), guards.size);
      const told = all > guards.size ? `${guards.size} of ${counted(all, "guard")}` : counted(guards.size, "guard");
      const calls = message.views.reduce(
        (all, view) => all + view.guards.reduce((sum, guard) => sum + callRate(guard.rates), 0),
        0,
      );
      const load = message.views.reduce((sum, view) => sum + number(view.load), 0) / (message.views.length || 1);
      setText(
        byId("verdict-text"),
        connected
          ? [counted(message.views.length, "pod"), told, `${amount(calls)} calls/s`, `load ${percent(load)}`].join(" · ")
          : `What is shown is from ${moment(message.at, now)}, ${span(now - message.at)} ago.`,
      );
      keyed.update(message.troubles, idOf, now, several);
      setHidden(byId("troubles"), message.troubles.length === 0);
      pods.update(message.views, (view) => view.pod.name, now);
      const title = clean(message.title, 80) || "Seawall";
      setText(byId("title"), title);
      const wanted = tone === "ok" ? title : `${words} \u00b7 ${title}`;
      if (document.title !== wanted) document.title = wanted;
    },
  };
}

function happeningPart() {
  const mark = shape();
  const at = make("time", "happening-at");
  const where = make("span", "happening-where");
  const what = make("span", "happening-what");
  const pods = make("span", "happening-pod");
  const trace = linkPart("trace");
  return {
    node: make("li", "happening", [at, mark.node, where, what, trace.node, pods]),
    update(one, now, several) {
      mark.set(toneOf(one.tone));
      setText(at, moment(one.at, now));
      const began = one.at - one.began >= 1 ? `, from ${moment(one.began, now)} on` : "";
      setAttribute(at, "title", `${span(now - one.at)} ago${began}`);
      setName(where, one.where, 80);
      setName(what, one.what, 300);
      setName(pods, one.pods.length === 1 ? one.pods[0] : `${one.pods.length} pods`, 60);
      setAttribute(pods, "title", clean(one.pods.join(", "), 400));
      setHidden(pods, !several);
      trace.update(one.trace_link);
    },
  };
}

/** What happened on all pods, the latest first. */
export function happeningsPart() {
  const keyed = new Keyed(byId("happenings"), happeningPart);
  return {
    update(message, now) {
      const keys = new Map();
      const keyOf = (one) => {
        // The same line for as long as something goes on: its beginning names it.
        const key = `${one.began} ${one.where} ${one.what.split(" ", 3).join(" ")}`;
        keys.set(key, (keys.get(key) ?? 0) + 1);
        return `${key} ${keys.get(key)}`;
      };
      keyed.update(message.happened, keyOf, now, message.views.length > 1);
      setHidden(byId("no-happenings"), message.happened.length > 0);
    },
  };
}
