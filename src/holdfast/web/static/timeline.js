// The steps of a run as a kelp plant: a stipe for each branch, a blade for each step, the holdfast where the run begins.

import { svg } from "./dom.js";
import { extent, linear } from "./scales.js";

export const SLOT = 7; // pixels that a blade needs; more steps than that share one
const WORST = ["damaged", "left_behind", "abandoned", "committed"];
const LANE_MOST = 46;

export function laneHeight(lanes) {
  return Math.max(16, Math.min(LANE_MOST, Math.floor(240 / Math.max(1, lanes))));
}

export function lanesOf(rows) {
  const branches = [...new Set(rows.map((row) => row.branch ?? 0))].sort((a, b) => a - b);
  return new Map(branches.map((branch, index) => [branch, index]));
}

// Steps that fall on the same few pixels become one blade that says how many it is.
export function blades(rows, lanes, x) {
  const found = new Map();
  for (const row of rows) {
    const lane = lanes.get(row.branch ?? 0);
    const slot = Math.round(x(row.step) / SLOT);
    const name = `${lane}/${slot}`;
    const blade = found.get(name) || { lane, x: x(row.step), rows: [] };
    blade.rows.push(row);
    found.set(name, blade);
  }
  return [...found.values()].map(summed).sort((a, b) => a.x - b.x);
}

// Draws into `group`, the lowest lane on the line y = base. Returns the blades with their places.
export function drawTimeline(group, rows, lanes, x, base, { leaving, flight, gone }) {
  const drawn = blades(rows, lanes, x);
  const stumps = [...new Set(gone.map((step) => Math.round(x(step.step) / 4) * 4))];
  const height = laneHeight(lanes.size);
  const y = (lane) => base - lane * height;
  drawStems(group, drawn, y, rows, lanes, x);
  const sizes = extent(drawn.map((blade) => blade.bytes)) || [0, 1];
  const grown = linear([0, sizes[1] || 1], [height * 0.3, height * 0.72]);
  const apart = closest(drawn);
  drawn.forEach((blade) => group.append(bladeShape(blade, y(blade.lane), grown(blade.bytes), apart, leaving)));
  if (flight) group.append(bud(x(flight.step), y(lanes.size - 1), flight));
  const start = Math.min(...drawn.map((blade) => blade.x), ...stumps);
  const rooted = drawn.filter((blade) => blade.lane === 0).map((blade) => blade.x);
  if (stumps.length) group.append(svg("path", { class: "stem bare", d: `M${start} ${base} H${rooted.length ? Math.max(start, rooted[0]) : Math.max(...stumps)}` }));
  for (const place of stumps) group.append(svg("path", { class: "stump", d: `M${place} ${base} l1 -6` }));
  if (drawn.length) group.append(roots(start, base));
  return drawn;
}

function summed(blade) {
  const bytes = Math.max(...blade.rows.map((row) => row.bytes || 0));
  const state = WORST.find((name) => blade.rows.some((row) => row.state === name)) || blade.rows[0].state;
  return { ...blade, bytes, state, tags: blade.rows.flatMap((row) => row.tags || []) };
}

function closest(drawn) {
  let least = Infinity;
  const before = new Map();
  for (const blade of drawn) {
    if (before.has(blade.lane)) least = Math.min(least, blade.x - before.get(blade.lane));
    before.set(blade.lane, blade.x);
  }
  return least;
}

function drawStems(group, drawn, y, rows, lanes, x) {
  for (const lane of lanes.values()) {
    const own = drawn.filter((blade) => blade.lane === lane);
    if (!own.length) continue;
    const first = own[0].x;
    const last = own[own.length - 1].x;
    const drifted = own.every((blade) => blade.state === "abandoned");
    const parent = lane > 0 ? forkPlace(rows, lanes, lane, x) : null;
    const start = parent ? forkPath(parent.x, y(parent.lane), first, y(lane)) : `M${first} ${y(lane)}`;
    group.append(svg("path", { class: `stem${drifted ? " drifted" : ""}`, d: `${start} L${last} ${y(lane)}` }));
  }
}

function forkPath(x, y, endX, endY) {
  const reach = Math.min(44, Math.max(6, endX - x));
  return `M${x} ${y} C${x + reach * 0.7} ${y} ${x + reach * 0.3} ${endY} ${x + reach} ${endY}`;
}

function forkPlace(rows, lanes, lane, x) {
  const own = rows.filter((row) => lanes.get(row.branch ?? 0) === lane);
  const first = own.reduce((a, b) => (b.step < a.step ? b : a), own[0]);
  const parent = rows.find((row) => row.step === first.parent && lanes.get(row.branch ?? 0) < lane);
  return parent ? { x: x(parent.step), lane: lanes.get(parent.branch ?? 0) } : null;
}

function bladeShape(blade, y, length, apart, leaving) {
  const going = blade.rows.some((row) => leaving.has(row.folder));
  const shape = svg("g", { class: `blade ${blade.state}${going ? " going" : ""}`, transform: `translate(${blade.x} ${y})` });
  shape.append(svg("path", { d: leaf(length, apart) }));
  if (blade.state === "damaged") shape.append(svg("path", { class: "cross", d: `M-4 ${-length - 10} l8 8 m0 -8 l-8 8` }));
  if (blade.tags.length) shape.append(svg("circle", { class: "tag-mark", cx: 0, cy: 6, r: 2.6 }));
  return shape;
}

// A blade leans as kelp does in a current.
function leaf(length, apart) {
  const w = Math.max(1.8, Math.min(7, length * 0.28, apart * 0.34));
  return `M0 0 C${-w * 0.9} ${-length * 0.3} ${-w * 0.2} ${-length * 0.72} ${w * 1.1} ${-length} C${w * 1.35} ${-length * 0.62} ${w * 1.2} ${-length * 0.22} 0 0Z`;
}

function bud(x, y, flight) {
  const share = flight.total > 0 ? Math.min(1, flight.written / flight.total) : 0;
  const round = 2 * Math.PI * 6;
  return svg("g", { class: "bud", transform: `translate(${x} ${y - 10})` },
    svg("path", { class: "stem young", d: "M0 10 V6" }),
    svg("circle", { class: "bud-rest", r: 6 }),
    svg("circle", { class: "bud-done", r: 6, transform: "rotate(-90)", "stroke-dasharray": `${round * share} ${round}` }));
}

function roots(x, y) {
  return svg("path", { class: "roots", d: `M${x} ${y} c-5 1 -9 1 -13 5 M${x} ${y} c-4 2 -7 5 -8 11 M${x} ${y} c-2 4 -2 8 -1 14 M${x} ${y} c1 4 4 6 6 11 M${x - 4} ${y + 4} c-4 2 -6 3 -9 7` });
}
