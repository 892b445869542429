// The numbers of a chart at the moment where the pointer is.

import { make, setHidden, setText } from "./dom.js";
import { readAt } from "./charts.js";

/** Show them for whatever chart the pointer is on. */
export function readChartsOut() {
  const node = make("div", "readout", [], { "aria-hidden": "true" });
  node.hidden = true;
  document.body.append(node);

  function show(event) {
    const chart = event.target instanceof Element ? event.target.closest("svg.chart") : null;
    const box = chart?.getBoundingClientRect();
    const text = box ? readAt(chart, (event.clientX - box.left) / box.width) : null;
    setHidden(node, text === null);
    if (text === null) return;
    setText(node, text);
    const left = Math.min(event.clientX + 14, window.innerWidth - node.offsetWidth - 8);
    const above = box.top - node.offsetHeight - 6;
    node.style.setProperty("transform", `translate(${left}px, ${above > 0 ? above : box.bottom + 6}px)`);
  }

  document.addEventListener("pointermove", show, { passive: true });
  document.addEventListener("scroll", () => setHidden(node, true), { passive: true });
}
