// A strip of small bars, one for each blade of the timeline above: time to publish, stall, size.

import { svg } from "./dom.js";
import { extent, linear } from "./scales.js";

// amount(row) gives a number or null; of the rows that share a place the highest is drawn.
export function drawBars(group, places, { amount, top, height, left, right, name, text, kind }) {
  const amounts = places.map((place) => extent(place.rows.map(amount)));
  const most = extent(amounts.map((range) => (range ? range[1] : null)));
  group.append(svg("text", { class: "axis-name", x: left, y: top - 6 }, name), svg("line", { class: "grid", x1: left, x2: right, y1: top + height, y2: top + height }));
  if (!most) {
    group.append(svg("text", { class: "tick", x: left + 4, y: top + height - 5 }, "not recorded"));
    return;
  }
  const grown = linear([0, most[1] || 1], [0, height]);
  group.append(svg("text", { class: "tick", x: left - 8, y: top + 8, "text-anchor": "end" }, text(most[1])));
  const width = Math.max(1.5, Math.min(10, ((right - left) / Math.max(places.length, 1)) * 0.55));
  places.forEach((place, index) => {
    if (!amounts[index]) return;
    const tall = Math.max(1, grown(amounts[index][1]));
    group.append(svg("rect", { class: `bar ${kind}`, x: place.x - width / 2, y: top + height - tall, width, height: tall, rx: Math.min(1.5, width / 2) }));
  });
}
