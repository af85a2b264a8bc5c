// Layers x tensors as a heat map on a canvas: 60 layers x 800 tensors draw at once. Arrow keys move, the readout says the cell.

import { changeRange, percent, shade } from "./comparison.js";
import { el, replace } from "./dom.js";
import { visible } from "./text.js";
import { color, onThemeChange } from "./theme.js";

const ROW_MOST = 26;
const ROW_LEAST = 7;
const GAP_FROM = 12; // cells this large have gaps between them

export function heatmap({ layers, columns, cells }, signal) {
  const canvas = el("canvas", { class: "heat-canvas", "aria-hidden": "true" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, el("span", { class: "hint" }, "Move over the map, or focus it and use the arrow keys."));
  const node = el("div", { class: "heat-scroll", tabindex: 0, role: "group", "aria-roledescription": "heat map", "aria-label": `Relative change of ${columns.length} tensors in ${layers.length} layers. Arrow keys move from cell to cell.` }, canvas);
  const holder = el("div", { class: "heat" }, node, readout, scale());
  const range = changeRange(cells);
  const state = { layer: -1, column: -1, size: null };

  function sizes() {
    const label = Math.min(260, 24 + 6.6 * Math.max(5, ...columns.map((name) => Math.min(name.length, 36))));
    const across = layers.length;
    const width = Math.max(200, node.clientWidth - label - 8);
    const cell = Math.max(ROW_LEAST, Math.min(34, Math.floor(width / Math.max(across, 1))));
    const row = Math.max(ROW_LEAST, Math.min(ROW_MOST, Math.floor(560 / Math.max(columns.length, 1))));
    return { label, cell, row, top: 20, width: label + across * cell + 8, height: 24 + columns.length * row };
  }

  // Tensors go down, layers go across, as depth is read in papers.
  function draw() {
    const size = sizes();
    state.size = size;
    const scaleUp = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.min(16000, size.width * scaleUp);
    canvas.height = Math.min(16000, size.height * scaleUp);
    canvas.style.width = `${size.width}px`;
    canvas.style.height = `${size.height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scaleUp, scaleUp);
    const colors = ramp();
    drawLabels(pen, size);
    columns.forEach((_, column) => layers.forEach((__, layer) => drawCell(pen, size, layer, column, colors)));
    drawChosen(pen, size);
  }

  function drawLabels(pen, size) {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillStyle = color("--soft");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(13 / size.row);
    columns.forEach((name, column) => column % every || pen.fillText(shortened(visible(name)), size.label - 8, size.top + (column + 0.5) * size.row));
    pen.textAlign = "center";
    const apart = Math.ceil(28 / size.cell);
    layers.forEach((layer, index) => index % apart || pen.fillText(visible(layer), size.label + (index + 0.5) * size.cell, 9));
  }

  function drawCell(pen, size, layer, column, colors) {
    const cell = (cells[layer] || [])[column];
    if (cell === null || cell === undefined) return;
    const gap = size.row >= GAP_FROM && size.cell >= GAP_FROM ? 1.5 : size.row >= GAP_FROM ? 0.5 : 0;
    pen.fillStyle = colors[Math.round(shade(cell, range) * (colors.length - 1))];
    pen.fillRect(size.label + layer * size.cell, size.top + column * size.row, size.cell - gap, size.row - gap);
  }

  function drawChosen(pen, size) {
    if (state.layer < 0) return;
    pen.strokeStyle = color("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(size.label + state.layer * size.cell - 1, size.top + state.column * size.row - 1, size.cell + 1, size.row + 1);
  }

  function choose(layer, column) {
    const [nextLayer, nextColumn] = [Math.max(0, Math.min(layers.length - 1, layer)), Math.max(0, Math.min(columns.length - 1, column))];
    if (nextLayer === state.layer && nextColumn === state.column) return;
    Object.assign(state, { layer: nextLayer, column: nextColumn });
    draw();
    replace(readout, `layer ${visible(layers[nextLayer])} · `, el("code", null, visible(columns[nextColumn])), ` · ${percent((cells[nextLayer] || [])[nextColumn])}`);
  }

  node.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientX - box.left - state.size.label) / state.size.cell);
    const column = Math.floor((event.clientY - box.top - state.size.top) / state.size.row);
    if (layer >= 0 && layer < layers.length && column >= 0 && column < columns.length) choose(layer, column);
  });
  node.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [across, down] = moves[event.key];
    choose(Math.max(0, state.layer) + (state.layer < 0 ? 0 : across), Math.max(0, state.column) + (state.layer < 0 ? 0 : down));
  });
  const observer = new ResizeObserver(() => requestAnimationFrame(() => node.isConnected && draw()));
  observer.observe(node);
  onThemeChange(draw, signal);
  signal.addEventListener("abort", () => observer.disconnect());
  return holder;

  function scale() {
    const shown = changeRange(cells);
    if (!shown) return el("p", { class: "note" }, "No tensor of a layer changed.");
    return el("div", { class: "heat-scale", "aria-hidden": "true" }, el("span", null, "unchanged"), el("i", { class: "swatch none" }), el("span", null, percent(shown[0])), el("i", { class: "swatch ramp" }), el("span", null, percent(shown[1])), el("span", { class: "note" }, "norm of the change / norm before, logarithmic"));
  }
}

// The colors of the stylesheet, blended to 64 shades; the first is "unchanged".
function ramp() {
  const stops = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map((name) => channels(color(name)));
  return Array.from({ length: 64 }, (_, index) => {
    const place = (index / 63) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    const mixed = stops[low].map((from, channel) => Math.round(from + (stops[low + 1][channel] - from) * (place - low)));
    return `rgb(${mixed.join(" ")})`;
  });
}

function channels(text) {
  const digits = parseInt(text.replace("#", ""), 16);
  return [digits >> 16, (digits >> 8) & 255, digits & 255];
}

function shortened(name) {
  return name.length > 36 ? `…${name.slice(-35)}` : name;
}
