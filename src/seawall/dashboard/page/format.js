// Numbers, spans and moments in words.

const minute = 60;
const hour = 3600;
const day = 86400;

function short(value, digits) {
  return value.toFixed(digits).replace(/\.0+$/, "");
}

/** A number for people: 0, 0.4, 12, 1.3k. */
export function amount(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.05) return "<0.1";
  if (size < 9.95) return short(value, 1);
  if (size < 9999.5) return short(value, 0);
  if (size < 999500) return `${short(value / 1e3, 1)}k`;
  return `${short(value / 1e6, 1)}M`;
}

/** A latency: 0.4 ms, 240 ms, 2.4 s. */
export function latency(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "\u2013";
  if (seconds < 0.00995) return `${short(seconds * 1e3, 1)} ms`;
  if (seconds < 0.9995) return `${short(seconds * 1e3, 0)} ms`;
  return seconds < 99.5 ? `${short(seconds, seconds < 9.95 ? 1 : 0)} s` : span(seconds);
}

/** A span of time: 12 s, 3 min 4 s, 2 h 5 min, 3 d 4 h. */
export function span(seconds) {
  const all = Math.max(0, Math.floor(seconds));
  const two = (large, largeName, small, smallName) =>
    small ? `${large} ${largeName} ${small} ${smallName}` : `${large} ${largeName}`;
  if (all < minute) return `${all} s`;
  if (all < hour) return two(Math.floor(all / minute), "min", all % minute, "s");
  if (all < day) return two(Math.floor(all / hour), "h", Math.floor((all % hour) / minute), "min");
  return two(Math.floor(all / day), "d", Math.floor((all % day) / hour), "h");
}

const time = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** A moment as this place's clock shows it, with the date if it is another day than `now`'s. */
export function moment(unix, now) {
  if (!Number.isFinite(unix) || Math.abs(unix) > 8.6e12) return "\u2013";
  const at = new Date(unix * 1000);
  const today = new Date(now * 1000).toDateString() === at.toDateString();
  return today ? time.format(at) : `${date.format(at)} ${time.format(at)}`;
}

/** How old what is shown of a pod is, in words. */
export function asOf(view, now) {
  return view.gone === null ? `as of ${span(view.age)} ago` : `gone since ${moment(view.gone, now)}`;
}

/** A share: 0 %, 0.4 %, 42 %. */
export function percent(share) {
  if (!Number.isFinite(share)) return "\u2013";
  const value = share * 100;
  if (value > 0 && value < 0.05) return "<0.1 %";
  return `${short(value, value < 9.95 ? 1 : 0)} %`;
}

/** A count and its noun: 1 pod, 3 pods. */
export const counted = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

const ROUND = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

/** The next round number that is not below. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return (ROUND.find((one) => one >= value / power - 1e-9) ?? 10) * power;
}

/** A breaker's state as a word. */
export const stateWord = (state) => (state === "half_open" ? "half-open" : state);
