// The page: takes in messages and lets each part show what is its own.
//
// Other scripts of this dashboard have `window.seawall`: `subscribe(fn)` calls `fn(message)` for
// each message and returns how to end it; `post(route, body)` posts with the session's token.

import { isScrolling, setAttribute, setHidden, setName, setText, setTone } from "./dom.js";
import { counted, moment } from "./format.js";
import { guardsPart } from "./guards.js";
import { listen } from "./keys.js";
import { Live } from "./live.js";
import { lookupPart } from "./lookup.js";
import { post } from "./operate.js";
import { membersPart } from "./members.js";
import { pipelinesPart } from "./pipelines.js";
import { readChartsOut } from "./readout.js";
import { Pasts } from "./past.js";
import { sectionsPart } from "./sections.js";
import { happeningsPart, verdictPart } from "./verdict.js";
import { workPart } from "./work.js";

const byId = (id) => document.getElementById(id);
const pasts = new Pasts();
const guards = guardsPart();
const pipelines = pipelinesPart();
const members = membersPart();
const sections = sectionsPart();
const verdict = verdictPart();
const happenings = happeningsPart();
const lookup = lookupPart();
const work = workPart();
const subscribers = new Set();
let last = null;

/** One part's failure leaves the others as they are. */
function safely(show) {
  try {
    show();
  } catch (error) {
    console.error(error);
  }
}

function showHeader(now) {
  const status = live.status((at) => moment(at, now));
  setTone(byId("live"), status.tone);
  setText(byId("live-text"), status.words);
  setAttribute(document.body, "data-live", status.live ? "yes" : "no");
  setText(byId("live-pods"), last ? counted(last.views.length, "pod") : "");
  const operator = last?.operator ?? null;
  setName(byId("who"), operator ?? "read only", 40);
  setHidden(byId("who-role"), operator === null);
  setHidden(byId("who").parentElement, last === null);
  return status.live;
}

/** What changes with the clock alone. */
function showTime() {
  const now = live.now();
  const connected = showHeader(now);
  if (last === null) return;
  safely(() => verdict.update(last, now, connected));
}

function show() {
  showTime();
  safely(() => guards.update(last, pasts));
  safely(() => pipelines.update(last, pasts));
  safely(() => members.update(last, pasts));
  safely(() => sections.update(last, pasts));
  safely(() => happenings.update(last, live.now()));
  safely(() => lookup.update(last));
  safely(() => work.update(last));
}

const LONGEST = 3000; // Milliseconds for which a page that is scrolled on and on is not updated.
let waitsSince = null;

/** Show the last message when the page rests. */
function showSoon() {
  const waits = isScrolling() && performance.now() - (waitsSince ??= performance.now()) < LONGEST;
  if (waits) {
    setTimeout(showSoon, 100);
    return;
  }
  waitsSince = null;
  // A page that nobody sees only keeps count.
  if (!document.hidden) show();
}

function take(message) {
  last = message;
  safely(() => pasts.take(message));
  if (waitsSince === null) showSoon();
  for (const tell of subscribers) safely(() => tell(message));
}

window.seawall = Object.freeze({
  subscribe(tell) {
    subscribers.add(tell);
    if (last !== null) safely(() => tell(last));
    return () => subscribers.delete(tell);
  },
  post,
});

const live = new Live(take);
listen(guards);
readChartsOut();
showHeader(live.now());
setInterval(() => document.hidden || showTime(), 1000);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && last !== null) show();
});
