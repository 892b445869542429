// The stream of messages: connected, lost and found again; each message checked as it comes in.

import { list, number } from "./dom.js";
import { MEMBERS } from "./sections.js";

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isNamed = (value) => isObject(value) && typeof value.name === "string";

const MOST_PODS = 66; // This one, the 64 that a store tells of, and what it tells of the rest.

/** How old a view is: as it was told, by the store's clock; or by both pods' clocks. */
function ageOf(view, at) {
  return Math.max(0, number(view.age, at - number(view.at, at)));
}

function readView(view, at) {
  const every = Math.min(60, Math.max(0.1, number(view.every, 1)));
  const age = ageOf(view, at);
  const gone = number(view.gone, null);
  const sections = Object.create(null); // A title may be any text, "__proto__" too.
  for (const [title, rows] of Object.entries(isObject(view.sections) ? view.sections : {}).slice(0, 20)) {
    sections[title] = list(rows, title === MEMBERS ? 300 : 100).filter(isNamed);
  }
  return {
    ...view,
    every,
    sections,
    at: number(view.at, at),
    age,
    heardAt: at - age,
    gone,
    stale: gone !== null || age > 3 * every,
    operable: view.operable === true,
    troubles: list(view.troubles, 100).filter(isObject),
    guards: list(view.guards, 200).filter(isNamed),
  };
}

const text = (value) => (typeof value === "string" ? value : "");

function readTrouble(one, at) {
  return { ...one, id: text(one.id), where: text(one.where), since: number(one.since, at), pods: list(one.pods, MOST_PODS).map(text) };
}

function readTroubles(troubles, at) {
  return list(troubles, 100)
    .filter(isObject)
    .map((one) => ({
      ...readTrouble(one, at),
      consequences: list(one.consequences, 20).filter(isObject).map((each) => readTrouble(each, at)),
    }));
}

function readHappened(happened) {
  return list(happened, 60)
    .filter(isObject)
    .map((one) => ({ ...readTrouble(one, 0), at: number(one.at), began: number(one.began), what: text(one.what) }));
}

/** A message with all its parts there, and nothing in numbers that a page cannot show. */
export function readMessage(data) {
  const message = JSON.parse(data);
  if (!isObject(message)) throw new TypeError("a message is an object");
  const at = number(message.at, Date.now() / 1000);
  const views = list(message.views, MOST_PODS)
    .filter((view) => isObject(view) && view.format === 1 && isNamed(view.pod))
    .map((view) => readView(view, at))
    .sort((a, b) => (a.pod.name < b.pod.name ? -1 : 1));
  return {
    ...message,
    at,
    views,
    verdict: isObject(message.verdict) ? message.verdict : { tone: "off", words: "" },
    troubles: readTroubles(message.troubles, at),
    happened: readHappened(message.happened),
    operator: typeof message.operator === "string" ? message.operator : null,
    history: isObject(message.history) ? message.history : null,
    extra: isObject(message.extra) ? message.extra : null,
  };
}

/**
 * Listen to the stream for as long as the page lives.
 *
 * `onMessage(message)` for each; `status(now)` says how the connection is. The browser connects
 * again by itself after a break; where it gives up (the answer was no stream), this asks again.
 */
export class Live {
  constructor(onMessage) {
    this.onMessage = onMessage;
    this.source = null;
    this.lostAt = null;
    this.heardAt = null;
    this.saidAt = 0; // The last message's own time.
    this.every = 1;
    this.ahead = 0; // Seconds that the server's clock is ahead of this one's.
    this.#connect();
  }

  /** The server's time now, in Unix seconds. */
  now() {
    return Date.now() / 1000 + this.ahead;
  }

  /** How the connection is, as a tone and words; `live` is whether what is shown is of now. */
  status(said) {
    const now = performance.now() / 1000;
    if (this.heardAt === null) {
      const words = this.lostAt === null ? "connecting" : "cannot connect, trying again";
      return { tone: this.lostAt === null ? "off" : "bad", live: true, words };
    }
    if (this.lostAt !== null) {
      return { tone: "bad", live: now - this.lostAt < 3 * this.every, words: `reconnecting since ${said(this.saidAt)}` };
    }
    const silent = now - this.heardAt > 3 * this.every + 1;
    if (silent) return { tone: "warn", live: false, words: `stale since ${said(this.saidAt)}` };
    return { tone: "ok", live: true, words: "live" };
  }

  #connect() {
    const source = new EventSource("events");
    this.source = source;
    source.addEventListener("message", (event) => {
      let message;
      try {
        message = readMessage(event.data);
      } catch (error) {
        console.warn("a message was left out:", error);
        return;
      }
      this.lostAt = null;
      this.heardAt = performance.now() / 1000;
      this.saidAt = message.at;
      this.ahead = message.at - Date.now() / 1000;
      this.every = Math.max(0.1, ...message.views.map((view) => view.every));
      this.onMessage(message);
    });
    source.addEventListener("error", () => {
      this.lostAt ??= performance.now() / 1000;
      if (source.readyState !== EventSource.CLOSED) return;
      source.close();
      setTimeout(() => this.#connect(), 3000);
    });
  }
}
