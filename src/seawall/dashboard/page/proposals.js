// What `seawall tune` would propose for the policies of a guard: asked for when a layer is opened.

import { Keyed, clean, list, make, setHidden, setText } from "./dom.js";

const FRESH = 30_000; // Milliseconds for which an answer is shown before it is asked for again.
const known = new Map();

/** The proposals for one guard on one pod; the last answer at once, a new one when it comes. */
async function proposalsFor({ guard, pod }) {
  const key = JSON.stringify([guard, pod]);
  const last = known.get(key);
  if (last && performance.now() - last.at < FRESH) return last.proposals;
  const query = new URLSearchParams({ guard, pod });
  const asked = fetch(`tune?${query}`, { credentials: "same-origin", cache: "no-store" })
    .then((answer) => (answer.ok ? answer.json() : {}))
    .then((said) => list(said.proposals, 20))
    .catch(() => []);
  known.set(key, { at: performance.now(), proposals: asked });
  return asked;
}

/** A word for a shell, whatever is in it: names of guards may be anything. */
const quoted = (text) => `'${clean(text, 200).replaceAll("'", "'\\''")}'`;

const address = () => location.href.replace(/[?#].*$/, "").replace(/\/$/, "");

/** What is proposed beside one layer; a policy that would be added stands at the one it goes before. */
export function proposalPart() {
  const listed = make("ul", "proposals");
  const keyed = new Keyed(listed, () => {
    const words = make("strong");
    const reason = make("span", "why");
    return {
      node: make("li", "", [words, reason]),
      update({ policy, words: what, reason: why }) {
        setText(words, `${clean(policy, 40).replaceAll("_", " ")}: ${clean(what, 200)}`);
        setText(reason, clean(why, 300));
      },
    };
  });
  const command = make("code");
  const node = make("aside", "proposal", [
    make("p", "", ["Proposed, not proven. To prove it: ", command]),
    listed,
  ]);
  setHidden(node, true);
  let shownFor = "";
  return {
    node,
    async update(index, layers, target) {
      shownFor = `${target.pod} ${target.guard}`;
      const wanted = shownFor;
      const found = await proposalsFor(target);
      if (wanted !== shownFor) return; // Another guard took its place meanwhile.
      const mine = found.filter(({ place }) => Math.min(Number(place), layers - 1) === index);
      keyed.update(mine, ({ policy, place }) => `${policy} ${place}`);
      setText(command, `seawall tune --url ${address()} --guard ${quoted(target.guard)}`);
      setHidden(node, mine.length === 0);
    },
  };
}
