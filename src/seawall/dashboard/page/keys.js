// Theme, keys and help.

import { setText } from "./dom.js";

const byId = (id) => document.getElementById(id);
const THEMES = ["auto", "dark", "light"];
const NAMES = { auto: "Auto", dark: "Dark", light: "Light" };

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Storage is forbidden here: it holds until the page is left.
  }
}

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function themeOf() {
  const chosen = document.documentElement.dataset.theme;
  return THEMES.includes(chosen) ? chosen : "auto";
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  remember("seawall-theme", theme);
  showTheme();
}

function showTheme() {
  const theme = themeOf();
  setText(byId("theme"), NAMES[theme]);
  byId("theme").setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(themeOf()) + 1) % THEMES.length]);
}

function toggleStacks() {
  const hidden = document.documentElement.dataset.stacks === "hidden";
  document.documentElement.dataset.stacks = hidden ? "shown" : "hidden";
  remember("seawall-stacks", hidden ? "shown" : "hidden");
}

function openHelp() {
  if (!byId("help").open && !byId("confirm").open) byId("help").showModal();
}

/** Move the focus to the next band, or the one before. */
function step(guards, by) {
  const bands = guards.shown();
  if (!bands.length) return;
  const here = bands.indexOf(document.activeElement?.closest?.(".band"));
  const next = here < 0 ? (by > 0 ? 0 : bands.length - 1) : Math.min(bands.length - 1, Math.max(0, here + by));
  bands[next].focus({ preventScroll: true });
  bands[next].scrollIntoView({ block: "start" });
}

function typing(target) {
  return target instanceof HTMLElement && target.closest("input, textarea, select, [contenteditable]");
}

/** Listen to the keys and the buttons of the header. */
export function listen(guards) {
  if (remembered("seawall-stacks") === "hidden") document.documentElement.dataset.stacks = "hidden";
  showTheme();
  byId("theme").addEventListener("click", nextTheme);
  byId("keys").addEventListener("click", openHelp);
  byId("help-close").addEventListener("click", () => byId("help").close());
  const filter = byId("filter");
  filter.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    filter.value = "";
    filter.dispatchEvent(new Event("input"));
    filter.blur();
  });
  const keys = {
    j: () => step(guards, 1),
    k: () => step(guards, -1),
    t: nextTheme,
    s: toggleStacks,
    g: () => {
      byId("guards").blur();
      window.scrollTo({ top: 0 });
    },
    "/": () => filter.focus(),
    "?": openHelp,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (typing(event.target) || document.querySelector("dialog[open]")) return;
    // Arrows move between guards only from a guard: elsewhere they scroll, as everywhere.
    const onBand = document.activeElement?.classList.contains("band");
    const arrows = { ArrowDown: keys.j, ArrowUp: keys.k };
    const found = (Object.hasOwn(keys, event.key) && keys[event.key]) || (onBand && arrows[event.key]);
    if (!found) return;
    event.preventDefault();
    found();
  });
}
