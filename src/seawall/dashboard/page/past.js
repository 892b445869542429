// The last minutes of each pod: what the first message brought, and what came since.
//
// All lists of a pod have a point for each of its samples, the newest at the end; null where
// something was not there.

import { list, number } from "./dom.js";

export const KEEP = 180;
export const OUTCOMES = ["succeeded", "degraded", "failed", "rejected"];
const NUMBERS = [...OUTCOMES, "p50", "p99"];

/** Calls a second of a guard. A degraded call is one of those that failed or were refused, unless it
 *  shared the failure of another call; `call_count` of `seawall top` has the same rule. */
export function callRate(rates) {
  const [succeeded, degraded, failed, rejected] = OUTCOMES.map((name) => number(rates?.[name]));
  return succeeded + Math.max(degraded, failed + rejected);
}

/** What each outcome adds to a pile of calls: one that failed or was refused, and was then answered
 *  with less, is drawn once, as degraded. */
export function piled(past, i) {
  const values = OUTCOMES.map((name) => past[name][i]);
  if (values.every((value) => value === null)) return null;
  const [succeeded, degraded, failed, rejected] = values.map((value) => value ?? 0);
  const lost = failed + rejected;
  const share = lost > 0 ? Math.max(0, lost - degraded) / lost : 0;
  return [succeeded, degraded, failed * share, rejected * share];
}

/** The most calls a second of all points. */
export function mostCalls(past) {
  let most = 0;
  for (let i = 0; i < past.succeeded.length; i++) {
    const sum = (piled(past, i) ?? [0]).reduce((a, b) => a + b);
    if (sum > most) most = sum;
  }
  return most;
}

function point(value) {
  return number(value, null);
}

/** The end of `given`, as long as `length`: what is missing at the front is null. */
function fitted(given, length, read) {
  const values = Array.isArray(given) ? given.slice(-length).map(read) : [];
  return [...new Array(length - values.length).fill(null), ...values];
}

const state = (value) => (typeof value === "string" ? value : null);

class GuardPast {
  constructor(length, track = {}) {
    for (const name of NUMBERS) this[name] = fitted(track[name], length, point);
    this.breaker = fitted(track.breaker, length, state);
  }

  add(guard) {
    for (const name of OUTCOMES) this[name].push(point(guard?.rates?.[name]));
    this.p50.push(point(guard?.p50));
    this.p99.push(point(guard?.p99));
    this.breaker.push(state(guard?.breaker));
  }

  drop() {
    for (const name of NUMBERS) this[name].shift();
    this.breaker.shift();
  }
}

/** What is drawn of the rows of a view, by "kind/name"; of a stage by "pipe/pipeline/name". */
function* tracksOf(view) {
  for (const row of Object.values(view.sections).flat()) {
    yield [`${row.kind}/${row.name}`, row.track];
    for (const node of list(row.pipes?.nodes, 40)) yield [`pipe/${row.name}/${node?.name}`, node?.rate];
  }
}

/** What is known of one pod's last samples. */
export class Past {
  constructor(history = null) {
    const at = Array.isArray(history?.at) ? history.at.slice(-KEEP).map((one) => number(one)) : [];
    this.at = at;
    this.guards = new Map();
    this.rows = new Map();
    for (const [name, track] of Object.entries(history?.guards ?? {})) {
      this.guards.set(name, new GuardPast(at.length, track ?? {}));
    }
    for (const [name, track] of Object.entries(history?.rows ?? {})) {
      this.rows.set(name, fitted(track, at.length, point));
    }
  }

  /** Add a sample; one that is known already, or older, is left out. */
  add(view) {
    const at = number(view.at);
    if (this.at.length && at <= this.at[this.at.length - 1]) return;
    const before = this.at.length;
    this.at.push(at);
    const guards = new Map();
    for (const guard of view.guards) guards.set(guard.name, guard);
    for (const name of guards.keys()) {
      if (!this.guards.has(name)) this.guards.set(name, new GuardPast(before));
    }
    for (const [name, past] of this.guards) past.add(guards.get(name));
    const rows = new Map(tracksOf(view));
    for (const name of rows.keys()) {
      if (!this.rows.has(name)) this.rows.set(name, new Array(before).fill(null));
    }
    for (const [name, past] of this.rows) past.push(point(rows.get(name)));
    if (this.at.length > KEEP) this.#drop();
  }

  #drop() {
    this.at.shift();
    for (const [name, past] of this.guards) {
      past.drop();
      if (past.succeeded.every((one) => one === null)) this.guards.delete(name);
    }
    for (const [name, past] of this.rows) {
      past.shift();
      if (past.every((one) => one === null)) this.rows.delete(name);
    }
  }
}

const NOTHING = new GuardPast(0);

/**
 * The past of guards over hours, fetched when it is wanted: one request at a time, and for each
 * guard no more often than its points come.
 */
export class Hours {
  constructor() {
    this.span = 0; // Seconds; 0: the last minutes, which come by themselves.
    this.known = new Map();
    this.asking = false;
  }

  /** Show another span, in seconds. */
  choose(span) {
    this.span = span;
    this.known.clear();
  }

  /** What is known of a guard on a pod: its times, its numbers and the seconds between points. */
  of(guard, pod) {
    const known = this.known.get(guard);
    return { step: known?.step ?? 60, ...(known?.pods.get(pod) ?? { at: [], past: NOTHING }) };
  }

  /** Ask for the first of these guards whose past is not known, or is old; then call `then()`. */
  async refresh(guards, then) {
    if (!this.span || this.asking) return;
    const now = performance.now() / 1000;
    const wanted = guards.find((guard) => !(now - this.known.get(guard)?.asked < this.known.get(guard)?.step));
    if (wanted === undefined) return;
    this.asking = true;
    const span = this.span;
    let told = null;
    try {
      const answer = await fetch(`hours?guard=${encodeURIComponent(wanted)}&span=${span}`);
      if (answer.ok) told = await answer.json();
    } catch {
      // The service is away; the page says so. It is asked again later.
    }
    this.asking = false;
    if (span !== this.span) return;
    const pods = new Map();
    for (const [pod, one] of Object.entries(told?.pods ?? {})) {
      const at = (Array.isArray(one?.at) ? one.at : []).map((each) => number(each));
      pods.set(pod, { at, past: new GuardPast(at.length, one?.guard ?? {}) });
    }
    this.known.set(wanted, { asked: now, step: number(told?.step, 10), pods });
    then();
  }
}

/** The pasts of all pods. */
export class Pasts {
  constructor() {
    this.pods = new Map();
  }

  /** Take in a message: its history replaces what is known, its views add to it. */
  take(message) {
    for (const [pod, history] of Object.entries(message.history ?? {})) {
      this.pods.set(pod, new Past(history));
    }
    const alive = new Set();
    for (const view of message.views) {
      alive.add(view.pod.name);
      if (!this.pods.has(view.pod.name)) this.pods.set(view.pod.name, new Past());
      this.pods.get(view.pod.name).add(view);
    }
    for (const pod of this.pods.keys()) if (!alive.has(pod)) this.pods.delete(pod);
  }

  of(pod) {
    return this.pods.get(pod) ?? new Past();
  }
}
