// Jobs, dead letters and events: listed, searched, opened; an operator retries and drops them.

import { Keyed, clean, list, make, number, setAttribute, setHidden, setName, setText } from "./dom.js";
import { amount, counted, span } from "./format.js";
import { confirmed, post, tell } from "./operate.js";

const byId = (id) => document.getElementById(id);
const LOOK_AGAIN = 5000; // Milliseconds between two looks at the counts.
const LOOK_FOR_FIRST = 30000; // The same, while there is no list.
const LETTERS = "dead_letters";
const KINDS = { queue: "queue", jobs: "jobs", outbox: "outbox", [LETTERS]: "dead letters" };
const NOUNS = { queue: ["job", "jobs"], jobs: ["job", "jobs"], outbox: ["event", "events"], [LETTERS]: ["letter", "letters"] };
const WORDS = { retry: { label: "Retry", done: "Retried" }, drop: { label: "Drop", done: "Dropped" } };
const REPLAY = { label: "Replay", done: "Marked to be replayed:" };
const OWNERS = { outbox: ["kind", "aggregate"], [LETTERS]: ["stage", "pipeline"] };
const SINCE = {
  dead: "died", failed: "failed", cancelled: "cancelled", succeeded: "ended", queued: "due", delayed: "due",
  claimed: "lease ends", running: "lease ends",
};
const SINCE_OF_LETTERS = { dead: "set aside", waiting: "replay asked for", claimed: "replay begun" };
const FAILED = new Set(["dead", "failed", "blocked"]);

async function read(route, asked = {}) {
  const query = new URLSearchParams(asked);
  const answer = await fetch(`${route}?${query}`, { credentials: "same-origin", cache: "no-store" });
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  throw new Error(clean(said.detail ?? `refused (${answer.status})`, 300));
}

/** Several lines of text, each fit to be shown. */
const lines = (text) => String(text ?? "").split("\n").slice(0, 2000).map((line) => clean(line, 2000)).join("\n");

/** Since when, or in how long. */
function when(seconds) {
  const value = number(seconds);
  return value < -0.5 ? `in ${span(-value)}` : `${span(value)} ago`;
}

/** What an act is called where it acts: a dead letter is replayed. */
const wordsOf = (act, kind) => (act === "retry" && kind === LETTERS ? REPLAY : WORDS[act]);

/** What an act does to an item of a state, for the question before it. */
function consequence(act, state, several, kind) {
  const it = several ? "They" : "It";
  if (act === "retry" && kind === LETTERS) return `${it} will go through the stage once more where ${several ? "they" : "it"} failed.`;
  if (act === "retry") {
    return state === "blocked"
      ? `${it} will be delivered again, and what waits behind follows.`
      : `${it} will be tried again, with all attempts, at the end of the line.`;
  }
  return FAILED.has(state) ? `${it} will be deleted for good.` : `${it} will not be done.`;
}

/** Buttons of which one is pressed. */
class Choice {
  constructor(node, choose) {
    this.keyed = new Keyed(node, (option) => {
      const name = make("span", "work-name");
      const count = make("span", "work-count");
      const button = make("button", "work-choice", [name, count], { type: "button" });
      let current = option;
      button.addEventListener("click", () => choose(current));
      return {
        node: button,
        update(now, chosen) {
          current = now;
          setName(name, now.label, 60);
          setText(count, now.count === undefined ? "" : amount(number(now.count)));
          setAttribute(button, "aria-pressed", now.key === chosen ? "true" : "false");
          setAttribute(button, "data-failed", now.failed && now.count > 0 ? "yes" : "no");
        },
      };
    });
  }

  update(options, chosen) {
    this.keyed.update(options, (option) => option.key, chosen);
  }
}

function rowPart(work) {
  const open = make("button", "work-open", [], { type: "button" });
  const about = make("div", "work-about");
  const error = make("td", "work-error");
  const payload = make("td", "work-preview");
  const attempts = make("td", "work-number");
  const since = make("td", "work-when");
  const acts = make("td", "work-acts");
  const buttons = new Map();
  for (const act of ["retry", "drop"]) {
    const button = make("button", act === "drop" ? "danger" : "", [], { type: "button" });
    button.addEventListener("click", () => work.act(act, item));
    buttons.set(act, button);
    acts.append(button);
  }
  const first = make("th", "work-what", [open, about], { scope: "row" });
  const node = make("tr", "", [first, error, payload, attempts, since, acts]);
  let item = null;
  open.addEventListener("click", () => work.open(item.id, open));
  return {
    node,
    update(now, operates) {
      item = now;
      setName(open, item.id, 60);
      setName(about, [item.kind, item.owner].filter(Boolean).join(" \u00b7 "), 100);
      setName(error, item.error, 200);
      setName(payload, item.preview, 160);
      setHidden(payload, !operates);
      setText(attempts, String(number(item.attempts)));
      setText(since, when(item.since));
      setHidden(acts, !operates);
      for (const [act, button] of buttons) {
        const { label } = work.words(act);
        setHidden(button, !list(item.acts).includes(act));
        setText(button, label);
        setAttribute(button, "aria-label", clean(`${label} ${item.id}`, 100));
      }
      setAttribute(node, "data-open", item.id === work.opened ? "yes" : "no");
    },
  };
}

class Work {
  constructor() {
    this.lists = [];
    this.chosen = null; // The list, by its key.
    this.state = null;
    this.search = "";
    this.before = []; // The places of the pages before this one.
    this.after = null;
    this.next = null;
    this.items = [];
    this.operates = false;
    this.opened = null;
    this.shown = null; // The item that is open.
    this.from = null; // What had the focus before.
    this.busy = false;
    this.stopped = false;
    this.lookAt = 0;
    this.asked = 0;
    this.tabs = new Choice(byId("work-lists"), (one) => this.choose(one.key));
    this.states = new Choice(byId("work-states"), (one) => this.choose(this.chosen, one.key));
    this.rows = new Keyed(byId("work-rows"), () => rowPart(this));
    byId("work-search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.search = byId("work-text").value.trim();
      this.first();
    });
    byId("work-text").addEventListener("search", () => {
      if (byId("work-text").value === "" && this.search !== "") {
        this.search = "";
        this.first();
      }
    });
    byId("work-again").addEventListener("click", () => this.load());
    byId("work-next").addEventListener("click", () => this.turn(1));
    byId("work-before").addEventListener("click", () => this.turn(-1));
    byId("work-stop").addEventListener("click", () => {
      this.stopped = true;
    });
    for (const act of ["retry", "drop"]) {
      byId(`work-all-${act}`).addEventListener("click", () => this.actOnAll(act));
      byId(`work-one-${act}`).addEventListener("click", () => this.act(act, this.shown));
    }
    byId("work-close").addEventListener("click", () => this.close());
    byId("work").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.opened !== null) this.close();
    });
  }

  get list() {
    return this.lists.find((one) => keyOf(one) === this.chosen) ?? null;
  }

  get named() {
    const { kind, name } = this.list;
    return { kind, name };
  }

  /** Look at which lists there are; reload the shown one if its count has changed. */
  async look() {
    const before = this.list?.counts?.[this.state];
    this.lists = list((await read("lists")).lists, 50);
    setHidden(byId("work"), this.lists.length === 0);
    if (this.lists.length === 0) this.lookAt = performance.now() + LOOK_FOR_FIRST;
    if (this.list === null) {
      if (this.lists.length) this.choose(keyOf(worst(this.lists)));
      return;
    }
    this.showChoices();
    const still = this.after === null && !this.busy;
    if (still && this.list.counts?.[this.state] !== before) await this.load();
  }

  choose(key, state = null, search = null) {
    if (this.busy) return;
    this.chosen = key;
    this.state = state ?? this.list.states[0];
    if (state === null || search !== null) {
      this.search = search ?? "";
      byId("work-text").value = this.search;
    }
    this.close();
    this.first();
  }

  first() {
    this.before = [];
    this.after = null;
    return this.load();
  }

  turn(by) {
    if (by > 0) {
      this.before.push(this.after);
      this.after = this.next;
    } else {
      this.after = this.before.pop() ?? null;
    }
    return this.load();
  }

  async load() {
    if (this.list === null) return;
    const asked = ++this.asked;
    this.showChoices();
    try {
      const place = this.after === null ? {} : { after: this.after };
      const said = await read("list", { ...this.named, state: this.state, search: this.search, ...place });
      if (asked !== this.asked) return; // Another list was chosen meanwhile.
      this.items = list(said.items, 100);
      this.next = typeof said.next === "string" ? said.next : null;
      this.show("");
    } catch (error) {
      if (asked !== this.asked) return;
      this.items = [];
      this.next = null;
      this.show(`Not listed: ${error.message}`);
    }
  }

  showChoices() {
    const options = this.lists.map((one) => {
      const failing = one.states[0];
      const label = `${one.name} \u00b7 ${KINDS[one.kind] ?? one.kind}`;
      return { key: keyOf(one), label, count: one.counts?.[failing], failed: true };
    });
    this.tabs.update(options, this.chosen);
    const states = this.list.states.map((state) => ({
      key: state,
      label: state,
      count: this.list.counts?.[state],
      failed: FAILED.has(state),
    }));
    this.states.update(states, this.state);
  }

  show(problem) {
    this.rows.update(this.items, (item) => item.id, this.operates);
    const none = this.items.length === 0;
    setHidden(byId("work-table"), none);
    setHidden(byId("work-none"), !none);
    const found = this.search ? ` that contain \u201c${clean(this.search, 60)}\u201d` : "";
    const further = this.next === null ? "" : " among those that were looked at: go on to the next page.";
    setText(byId("work-none"), problem || `No ${this.state} ${this.noun(2)}${found}${further || "."}`);
    for (const column of document.querySelectorAll("#work-table .for-operators")) setHidden(column, !this.operates);
    const actable = new Set(this.items.flatMap((item) => list(item.acts)));
    setHidden(byId("work-all"), !this.operates || actable.size === 0);
    for (const act of ["retry", "drop"]) {
      const button = byId(`work-all-${act}`);
      setHidden(button, !actable.has(act));
      setText(button, `${this.words(act).label} all${this.search ? " that match" : ""}`);
      button.disabled = this.busy;
    }
    const page = this.before.length + 1;
    setHidden(byId("work-pages"), page === 1 && this.next === null);
    setText(byId("work-page"), `page ${page}`);
    byId("work-before").disabled = page === 1;
    byId("work-next").disabled = this.next === null;
  }

  words(act) {
    return wordsOf(act, this.list?.kind);
  }

  noun(count) {
    const [one, many] = NOUNS[this.list.kind] ?? ["item", "items"];
    return count === 1 ? one : many;
  }

  // One item

  async open(id, from) {
    try {
      this.showItem((await read("item", { ...this.named, id })).item);
      this.opened = id;
      this.from = from;
      this.rows.update(this.items, (item) => item.id, this.operates);
      byId("work-detail").focus({ preventScroll: true });
      byId("work-detail").scrollIntoView({ block: "nearest" });
    } catch (error) {
      tell(`Not opened: ${error.message}`, "bad");
      await this.load();
    }
  }

  showItem(item) {
    this.shown = item;
    setName(byId("work-detail-title"), item.id, 120);
    const [kind, owner] = OWNERS[this.list.kind] ?? ["kind", "scope"];
    const since = (this.list.kind === LETTERS ? SINCE_OF_LETTERS : SINCE)[item.state] ?? "";
    const facts = [
      ["state", item.state],
      [kind, item.kind],
      [owner, item.owner],
      ["priority", item.priority],
      ["attempts", item.attempts],
      ["added", when(item.age)],
      [since, since ? when(item.since) : ""],
      ["payload", `${item.size} bytes`],
    ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
    byId("work-facts").replaceChildren(
      ...facts.map(([name, value]) => make("div", "", [make("dt", "", [name]), make("dd", "", [clean(value, 200)])])),
    );
    const blocks = [
      ["error", item.error],
      ["traceback", item.traceback],
      ["payload", item.payload === null ? "" : item.payload],
    ];
    for (const [name, text] of blocks) {
      setHidden(byId(`work-${name}-block`), !text);
      setText(byId(`work-${name}`), lines(text));
    }
    setHidden(byId("work-cut"), !item.cut);
    setHidden(byId("work-hidden"), item.payload !== null);
    for (const act of ["retry", "drop"]) {
      setHidden(byId(`work-one-${act}`), !this.operates || !list(item.acts).includes(act));
      setText(byId(`work-one-${act}`), this.words(act).label);
    }
    setHidden(byId("work-detail"), false);
  }

  close() {
    if (this.opened === null) return;
    this.opened = null;
    this.shown = null;
    setHidden(byId("work-detail"), true);
    this.rows.update(this.items, (item) => item.id, this.operates);
    if (this.from?.isConnected) this.from.focus();
  }

  async act(act, item) {
    if (this.busy || item === null) return;
    const { label, done } = this.words(act);
    const title = `${label} this ${item.state} ${this.noun(1)}?`;
    const what = [item.kind, item.owner].filter(Boolean).join(" \u00b7 ");
    const text = `${item.id}${what ? ` (${what})` : ""}. ${consequence(act, item.state, false, this.list.kind)}`;
    if (!(await confirmed(title, text, label))) return;
    await this.while(async () => {
      const said = await post("work", { ...this.named, act, ids: [item.id] });
      if (said.problem) throw new Error(said.problem);
      tell(said.done ? `${done} ${item.id}.` : `Nothing done: ${item.id} is not ${item.state} any more.`);
    });
  }

  async actOnAll(act) {
    if (this.busy) return;
    const match = this.search ? ` that contain \u201c${this.search}\u201d` : "";
    const of = `${this.state} ${this.noun(2)} of ${this.list.name}${match}`;
    const words = this.words(act);
    const text = `${consequence(act, this.state, true, this.list.kind)} They are done by the hundred, and can be stopped in between.`;
    if (!(await confirmed(`${words.label} all ${of}?`, text, `${words.label} all`))) return;
    const asked = { ...this.named, act, state: this.state, search: this.search };
    let done = 0;
    await this.while(async () => {
      this.stopped = false;
      let after = null;
      do {
        this.progress(`${words.done} ${counted(done, this.noun(1), this.noun(2))} so far`);
        const said = await post("work", { ...asked, after });
        done += number(said.done);
        after = said.next ?? null;
        if (said.problem) throw new Error(`${said.problem} ${words.done} ${done}.`);
      } while (after !== null && !this.stopped);
      tell(`${words.done} ${counted(done, this.noun(1), this.noun(2))}${this.stopped ? ", then stopped" : ""}.`);
    });
  }

  /** Act, one thing at a time; then show what is left. */
  async while(acting) {
    this.busy = true;
    this.show("");
    try {
      await acting();
    } catch (error) {
      tell(`Not done: ${error.message}`, "bad");
    } finally {
      this.busy = false;
      this.progress("");
      this.close();
      await this.first();
      this.lookAt = 0;
      // The button that had the focus is gone with its row.
      const there = document.activeElement !== document.body && document.activeElement !== null;
      if (!there) (byId("work-rows").querySelector("button") ?? byId("work-text")).focus({ preventScroll: true });
    }
  }

  progress(text) {
    setText(byId("work-progress-text"), text);
    setHidden(byId("work-progress"), text === "");
  }

  update(message) {
    const operates = (message.operator ?? null) !== null;
    const other = operates !== this.operates;
    this.operates = operates;
    if (other && this.list !== null) this.load();
    const now = performance.now();
    if (now < this.lookAt) return;
    this.lookAt = now + LOOK_AGAIN;
    this.look().catch((error) => console.info(error.message));
  }
}

const keyOf = (one) => `${one.kind}/${one.name}`;

/** The list with the most that failed, else the first. */
function worst(lists) {
  const failed = (one) => number(one.counts?.[one.states[0]]);
  return lists.reduce((a, b) => (failed(b) > failed(a) ? b : a));
}

let part = null;

/** The whole part of the page. */
export function workPart() {
  part ??= new Work();
  return part;
}

/** Whether this process has the dead letters of a pipeline. */
export const hasLetters = (pipeline) => part !== null && part.lists.some((one) => one.kind === LETTERS && one.name === pipeline);

/** Show the dead letters of a stage of a pipeline. */
export function showLetters(pipeline, stage) {
  part.choose(`${LETTERS}/${pipeline}`, "dead", stage);
  byId("work").scrollIntoView();
  byId("work-text").focus({ preventScroll: true });
}
