// A tensor as a rectangle, cut into the boxes that ranks hold. Of more than two dims the two that are cut most are drawn.

import { el, svg } from "./dom.js";
import { list, whole } from "./text.js";

const WIDE = 720;
const TALL = 320;
const LABELS_MOST = 128;
const COLORS = 8;

export function boxesPicture(shape, boxes) {
  const [down, across] = drawnDims(shape, boxes);
  const box = { rows: down === null ? 1 : shape[down], columns: across === null ? 1 : shape[across] };
  const height = down === null ? 64 : Math.max(64, Math.min(TALL, (WIDE * box.rows) / box.columns));
  const width = across === null ? 120 : Math.max(90, Math.min(WIDE, (Math.max(height, 120) * box.columns) / box.rows));
  const place = (one) => ({
    x: across === null ? 0 : (one.offsets[across] / box.columns) * width, w: across === null ? width : (one.sizes[across] / box.columns) * width,
    y: down === null ? 0 : (one.offsets[down] / box.rows) * height, h: down === null ? height : (one.sizes[down] / box.rows) * height,
  });
  const shapes = boxes.slice(0, 2048).map((one, index) => boxShape(one, place(one), index, boxes.length));
  const label = `${boxes.length} boxes of a tensor of ${shape.join(" by ")}; the table below lists them`;
  return el("figure", { class: "boxes" }, svg("svg", { viewBox: `-1 -18 ${width + 120} ${height + 22}`, role: "img", "aria-label": label, width: width + 120 },
    across === null ? null : svg("text", { class: "tick", x: 0, y: -6 }, `dim ${across}: ${whole(shape[across])}`),
    shapes,
    down === null ? null : svg("text", { class: "tick", x: width + 6, y: height / 2 }, `dim ${down}: ${whole(shape[down])}`)));
}

// Dims that some box cuts come first; a matrix is drawn as it is.
export function drawnDims(shape, boxes) {
  if (!shape.length) return [null, null];
  if (shape.length === 1) return [null, 0];
  const cut = shape.map((extent, dim) => new Set(boxes.map((box) => `${box.offsets[dim]}+${box.sizes[dim]}`)).size);
  const order = shape.map((_, dim) => dim).sort((a, b) => cut[b] - cut[a] || a - b).slice(0, 2).sort((a, b) => a - b);
  return [order[0], order[1]];
}

function boxShape(one, { x, y, w, h }, index, total) {
  const names = one.ranks.map(String);
  const text = names.length === 1 ? names[0] : names.length <= 4 ? names.join(" ") : `${names.length} ranks`;
  const group = svg("g", { class: `box box-${(one.ranks[0] ?? index) % COLORS}` },
    svg("rect", { x: x + 0.75, y: y + 0.75, width: Math.max(0.5, w - 1.5), height: Math.max(0.5, h - 1.5) }),
    svg("title", null, `ranks ${list(names, 16)}: offsets ${one.offsets.join(", ")}, sizes ${one.sizes.join(", ")}`));
  if (total <= LABELS_MOST && w > 9 * text.length && h > 14) group.append(svg("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle" }, text));
  return group;
}
