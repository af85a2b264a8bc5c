// A metric over steps as a line, with kills and restores on it. What a restore threw away stays, in pale.

import { svg } from "./dom.js";
import { extent, linear, logarithmic, ticks } from "./scales.js";
import { value } from "./text.js";

const DOTS_MOST = 60; // points that are few are drawn as points, too

// Training goes back to an earlier step after a restore: each stretch is a line of its own.
export function stretches(series) {
  const found = [];
  let now = null;
  for (let index = 0; index < series.step.length; index += 1) {
    const step = series.step[index];
    if (!now || step < now.step[now.step.length - 1]) {
      now = { step: [], value: [] };
      found.push(now);
    }
    now.step.push(step);
    now.value.push(series.value[index]);
  }
  return found;
}

// Parts of a stretch at or after the first step of a later one were undone by a restore.
export function lived(found) {
  let limit = Infinity;
  const parts = [];
  for (let index = found.length - 1; index >= 0; index -= 1) {
    const { step, value: values } = found[index];
    const end = step.findIndex((at) => at >= limit);
    const cut = end < 0 ? step.length : end;
    parts.unshift({ kept: points(step, values, 0, cut), undone: points(step, values, Math.max(0, cut - 1), end < 0 ? 0 : step.length) });
    limit = Math.min(limit, step[0]);
  }
  return parts;
}

export function metricScale(series, top, height) {
  const range = extent(series.value);
  if (!range) return null;
  const [low, high] = range;
  const steep = low > 0 && high / low > 50;
  const padded = steep ? [low * 0.9, high * 1.1] : [low - (high - low || Math.abs(low) || 1) * 0.06, high + (high - low || Math.abs(high) || 1) * 0.06];
  const place = (steep ? logarithmic : linear)(padded, [top + height, top]);
  const marks = steep ? decades(padded) : ticks(padded, 4);
  return { place, marks: marks.map((tick) => ({ y: place(tick), text: value(tick) })), steep };
}

export function drawCurve(group, series, marks, x, { top, height, left, right, text }) {
  const scale = metricScale(series, top, height);
  if (!scale) return;
  for (const mark of scale.marks) {
    group.append(svg("line", { class: "grid", x1: left, x2: right, y1: mark.y, y2: mark.y }), svg("text", { class: "tick", x: left - 8, y: mark.y + 4, "text-anchor": "end" }, mark.text));
  }
  group.append(svg("text", { class: "axis-name", x: left, y: top - 8 }, text));
  for (const part of lived(stretches(series))) {
    if (part.undone.length > 1) group.append(svg("path", { class: "curve undone", d: line(part.undone, x, scale.place) }));
    if (part.kept.length < DOTS_MOST) {
      for (const [step, number] of part.kept) if (Number.isFinite(number)) group.append(svg("circle", { class: "dot", cx: x(step), cy: scale.place(number), r: 2.2 }));
    }
    if (part.kept.length) group.append(svg("path", { class: "curve", d: line(part.kept, x, scale.place) }));
  }
  for (const mark of marks) group.append(...markShape(mark, x(mark.step), top, height));
}

function markShape(mark, x, top, height) {
  if (mark.kind === "kill") {
    return [svg("line", { class: "mark-kill", x1: x, x2: x, y1: top, y2: top + height }), svg("path", { class: "mark-kill", d: `M${x - 4} ${top - 4} l8 8 m0 -8 l-8 8` })];
  }
  if (mark.kind === "restore") {
    return [svg("line", { class: "mark-restore", x1: x, x2: x, y1: top, y2: top + height }), svg("path", { class: "mark-restore solid", d: `M${x - 1} ${top - 5} l7 5 l-7 5 Z` })];
  }
  return [];
}

function line(places, x, y) {
  let path = "";
  let pen = "M";
  for (const [step, number] of places) {
    if (typeof number !== "number" || !Number.isFinite(number)) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(step).toFixed(1)} ${y(number).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function points(step, values, start, end) {
  const found = [];
  for (let index = start; index < end; index += 1) found.push([step[index], values[index]]);
  return found;
}

function decades([low, high]) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.floor(Math.log10(high)); power += 1) found.push(10 ** power);
  return found.length > 1 ? found : ticks([low, high], 4).filter((tick) => tick > 0);
}
