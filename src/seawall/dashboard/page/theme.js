// Dark or light as was last chosen here, before anything is painted. The rest is in keys.js.

(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("seawall-theme");
  } catch {
    // Storage is forbidden here: the system's choice holds.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
