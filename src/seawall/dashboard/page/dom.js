// Making and changing elements, by text and safe attributes alone: never by markup.
//
// What comes in a message is named by users and other pods. It is only ever text here, cut to a
// length, without the characters that turn the direction of what stands beside it.

const SVG = "http://www.w3.org/2000/svg";
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const shown = new WeakMap();

/** Return `value` as one line of at most `most` characters, fit to be shown. */
export function clean(value, most = 200) {
  if (value === null || value === undefined) return "";
  const text = String(value).slice(0, most + 1).replace(UNSEEN, "\ufffd");
  return text.length > most ? text.slice(0, most) + "\u2026" : text;
}

/** Return a finite number, or `otherwise`. */
export function number(value, otherwise = 0) {
  return typeof value === "number" && Number.isFinite(value) ? value : otherwise;
}

/** Return a list of at most `most`; what is none is empty. */
export function list(value, most = 200) {
  return Array.isArray(value) ? (value.length > most ? value.slice(0, most) : value) : [];
}

/** Return the address if it is one of the web, else null: a link must not run anything. */
export function webAddress(value) {
  if (typeof value !== "string" || value.length > 2000) return null;
  try {
    const address = new URL(value);
    return address.protocol === "https:" || address.protocol === "http:" ? address.href : null;
  } catch {
    return null;
  }
}

const TONES = new Set(["ok", "warn", "bad", "off"]);

/** Return the tone if it is one. */
export const toneOf = (value) => (TONES.has(value) ? value : "off");

const RANK = { bad: 3, warn: 2, ok: 1, off: 0 };

/** Return how bad a tone is, to sort by. */
export const rank = (tone) => RANK[tone] ?? 0;

/** Make an element with a class, children (nodes or text) and attributes that the page itself chose. */
export function make(tag, className = "", children = [], attributes = {}) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Make an SVG element. */
export function draw(tag, attributes = {}, children = []) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Make the shape that says a tone without its colour. */
export function shape() {
  const use = draw("use", { href: "#shape-off" });
  const node = draw("svg", { class: "shape", "aria-hidden": "true" }, [use]);
  node.dataset.tone = "off";
  return {
    node,
    set(tone) {
      if (node.dataset.tone === tone) return;
      node.dataset.tone = tone;
      use.setAttribute("href", `#shape-${tone}`);
    },
  };
}

/** Set the text of `node` if it is another one. */
export function setText(node, text) {
  if (shown.get(node) === text) return;
  shown.set(node, text);
  node.textContent = text;
}

/** Set a text that may be too long for its place: all of it is in the title. */
export function setName(node, value, most = 120) {
  if (shown.get(node) === value) return;
  node.textContent = clean(value, most);
  node.title = clean(value, 1000);
  shown.set(node, value);
}

/** Set an attribute if it is another one. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Set data-tone if it is another one. */
export function setTone(node, tone) {
  if (node.dataset.tone !== tone) node.dataset.tone = tone;
}

/** Show or hide. */
export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/**
 * Keep the children of a parent in step with items that have keys.
 *
 * A part is made once for each key ({node, update}) and updated from then on; nodes are moved only
 * when the order is another one, so focus, selection and what is open stay.
 */
export class Keyed {
  constructor(parent, makePart) {
    this.parent = parent;
    this.makePart = makePart;
    this.parts = new Map();
  }

  update(items, keyOf, ...more) {
    const left = new Set(this.parts.keys());
    let cursor = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let part = this.parts.get(key);
      if (part && !left.has(key)) continue; // A key that comes twice is shown once.
      left.delete(key);
      if (!part) {
        part = this.makePart(item, key);
        this.parts.set(key, part);
      }
      while (cursor && cursor !== part.node && this.#gone(cursor, left)) {
        cursor = cursor.nextElementSibling;
      }
      if (cursor === part.node) cursor = cursor.nextElementSibling;
      else this.parent.insertBefore(part.node, cursor);
      part.update?.(item, ...more);
    }
    for (const key of left) {
      const part = this.parts.get(key);
      part.close?.();
      part.node.remove();
      this.parts.delete(key);
    }
  }

  #gone(node, left) {
    for (const key of left) if (this.parts.get(key).node === node) return true;
    return false;
  }
}

// Milliseconds after which a page that was scrolled rests.
const RESTS = 150;
let scrolledAt = -Infinity;
document.addEventListener("scroll", () => (scrolledAt = performance.now()), { passive: true, capture: true });

/** Whether the page is being scrolled: then drawing waits, so that no frame is late. */
export function isScrolling() {
  return performance.now() - scrolledAt < RESTS;
}
