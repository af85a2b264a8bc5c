// The picture of a run: the metric, the plant of steps below it, time to publish and stall below that, on one axis.

import { drawBars } from "./bars.js";
import { chartFrame } from "./chart_frame.js";
import { drawCurve } from "./curve.js";
import { el, replace, svg } from "./dom.js";
import { broken, extent, wholeTicks } from "./scales.js";
import { stateOf } from "./steps_table.js";
import { count, duration, milliseconds, size, stepName, value, visible, whole } from "./text.js";
import { drawTimeline, laneHeight, lanesOf, SLOT } from "./timeline.js";

const CURVE = 150;
const CURVE_TOP = 26;
const BARS = 34;
const TICK_APART = 56;

// `model()` gives {rows, series, metric, marks, leaving, flight} as they are now.
export function runChart(model, open) {
  const note = el("p", { class: "note" });
  const frame = chartFrame({
    label: "Steps of the run over training steps: metric, checkpoints, time to publish, stall. Arrow keys move from step to step, Enter opens one. The table of steps below has the same facts.",
    hint: "Move over the chart, or focus it and use the arrow keys.",
    height: () => layout(model()).total,
    draw: (group, width) => draw(group, width, model(), note),
    describe: (blade) => describe(blade, model()),
    open: (blade) => open(blade.rows[0]),
  });
  return { node: el("div", null, frame.node, note), update: frame.update };
}

function layout(now) {
  const curve = now.series ? CURVE_TOP + CURVE + 18 : 6;
  const lanes = lanesOf(now.rows).size || 1;
  const base = curve + 24 + (lanes - 1) * laneHeight(lanes) + laneHeight(lanes) * 0.8;
  const publish = base + 48;
  const stall = publish + BARS + 28;
  const hasStall = now.rows.some((row) => typeof row.stall_ms === "number");
  return { base, publish, stall, hasStall, total: (hasStall ? stall : publish) + BARS + 26 };
}

function draw(group, width, now, note) {
  const places = layout(now);
  const left = width < 520 ? 46 : 64;
  const right = width - 14;
  const axis = axisOf(now, left + 14, right - 10);
  const x = axis.place;
  const lanes = lanesOf(now.rows);
  if (now.series) drawCurve(group, now.series, now.marks, x, { top: CURVE_TOP, height: CURVE, left, right, text: visible(now.metric) });
  const blades = drawTimeline(group, now.rows, lanes, x, places.base, now);
  const common = { left, right, height: BARS };
  drawBars(group, blades, { ...common, amount: (row) => row.seconds, top: places.publish, name: "time to publish", text: duration, kind: "publish" });
  if (places.hasStall) drawBars(group, blades, { ...common, amount: (row) => row.stall_ms, top: places.stall, name: "stall of training", text: milliseconds, kind: "stall" });
  drawTicks(group, axis, width, places.total - 6);
  for (const gap of axis.breaks) group.append(breakMark(gap, places.base));
  replace(note, axis.breaks.length ? `Drawn short, because there are no steps: ${axis.breaks.map((gap) => `${whole(gap.from)} to ${whole(gap.to)}`).join(", ")}.` : "");
  return { places: blades.map((blade) => ({ x: blade.x, item: blade })) };
}

function axisOf(now, left, right) {
  const steps = now.rows.concat(now.gone).map((row) => row.step);
  return broken(domain(now), [left, right], steps, SLOT);
}

function drawTicks(group, axis, width, y) {
  let last = -Infinity;
  const put = (tick) => {
    const at = axis.place(tick);
    if (at - last < TICK_APART || at > width - 8) return;
    last = at;
    group.append(svg("text", { class: "tick", x: at, y, "text-anchor": "middle" }, whole(tick)));
  };
  if (!axis.breaks.length) return void wholeTicks(axis.pieces[0], width < 520 ? 3 : 7).forEach(put);
  for (const [from, to] of axis.pieces) {
    put(from);
    wholeTicks([from, to], Math.max(1, Math.floor((axis.place(to) - axis.place(from)) / 120))).forEach(put);
  }
}

function breakMark(gap, y) {
  return svg("g", { class: "break", transform: `translate(${gap.at} ${y})` }, svg("rect", { x: -7, y: -9, width: 14, height: 18 }),
    svg("path", { d: "M-7 8 L-1 -8 M1 8 L7 -8" }), svg("title", null, `no steps from ${whole(gap.from)} to ${whole(gap.to)}`));
}

function domain(now) {
  const steps = now.rows.map((row) => row.step).concat(now.gone.map((step) => step.step));
  if (now.series) steps.push(now.series.step[0], now.series.step[now.series.step.length - 1]);
  if (now.flight) steps.push(now.flight.step);
  const range = extent(steps) || [0, 1];
  return range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range;
}

function describe(blade, now) {
  if (blade.rows.length > 1) {
    const steps = extent(blade.rows.map((row) => row.step));
    const bad = blade.rows.filter((row) => row.state === "damaged").length;
    return `${count(blade.rows.length, "step")} here, ${whole(steps[0])} to ${whole(steps[1])}${bad ? `, ${bad} damaged` : ""}; largest ${size(blade.bytes)}`;
  }
  const row = blade.rows[0];
  const known = [
    `${stepName(row.folder)}, ${visible(stateOf(row)[0])}`,
    typeof row.bytes === "number" ? size(row.bytes) : null,
    typeof row.seconds === "number" ? `published in ${duration(row.seconds)}` : null,
    typeof row.stall_ms === "number" ? `stalled ${milliseconds(row.stall_ms)}` : null,
    now.metric && typeof row.metrics[now.metric] === "number" ? `${visible(now.metric)} ${value(row.metrics[now.metric])}` : null,
    (row.tags || []).length ? `tagged ${row.tags.map(visible).join(", ")}` : null,
    now.leaving.has(row.folder) ? `goes next: ${visible(now.leaving.get(row.folder))}` : null,
  ];
  return known.filter(Boolean).join(" · ");
}
