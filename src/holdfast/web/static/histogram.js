// A histogram of a tensor's values, with its numbers as the text alternative.

import { el, svg } from "./dom.js";
import { simpleTable } from "./parts.js";
import { count, value, whole } from "./text.js";

const WIDTH = 420;
const HEIGHT = 96;
const BASE = HEIGHT - 18;

export function histogram({ edges, counts }) {
  const most = counts.reduce((a, b) => Math.max(a, b), 0);
  if (!most || edges.length !== counts.length + 1) return el("p", { class: "empty" }, "No finite value to draw.");
  const wide = WIDTH / counts.length;
  const bars = counts.map((amount, index) => amount ? svg("rect", { class: "bar publish", x: index * wide + 0.5, width: Math.max(1, wide - 1), y: BASE - tall(amount, most), height: tall(amount, most) }, svg("title", null, `${value(edges[index])} to ${value(edges[index + 1])}: ${whole(amount)}`)) : null);
  const zero = edges[0] < 0 && edges[edges.length - 1] > 0 ? ((0 - edges[0]) / (edges[edges.length - 1] - edges[0])) * WIDTH : null;
  const label = `Histogram of ${counts.length} bins from ${value(edges[0])} to ${value(edges[edges.length - 1])}; the fullest has ${count(most, "value")}`;
  const picture = svg("svg", { class: "histogram", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    zero === null ? null : svg("line", { class: "grid", x1: zero, x2: zero, y1: 0, y2: BASE }), bars,
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }),
    svg("text", { class: "tick", x: 0, y: HEIGHT - 4 }, value(edges[0])),
    zero !== null && zero > 60 && zero < WIDTH - 60 ? svg("text", { class: "tick", x: zero, y: HEIGHT - 4, "text-anchor": "middle" }, "0") : null,
    svg("text", { class: "tick", x: WIDTH, y: HEIGHT - 4, "text-anchor": "end" }, value(edges[edges.length - 1])));
  const rows = counts.map((amount, index) => [`${value(edges[index])} to ${value(edges[index + 1])}`, whole(amount)]);
  return el("figure", { class: "histogram-figure" }, picture,
    el("details", null, el("summary", null, "as a table"), simpleTable("Histogram", [{ label: "Values" }, { label: "Count", class: "c-num" }], rows)));
}

// A square root keeps bins with few values in sight without the exaggeration of a logarithm.
function tall(amount, most) {
  return Math.max(1, Math.sqrt(amount / most) * (BASE - 6));
}
