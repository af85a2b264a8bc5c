// What every chart over training steps shares: a size that follows the page, a cursor, keys, and a readout in words.

import { el, replace, svg } from "./dom.js";

// draw(group, width) draws and returns {places: [{x, item}] sorted by x, bottom}; describe(item) gives the readout;
// open(item) is what Enter and a click do.
export function chartFrame({ label, height, draw, describe, open, hint }) {
  const drawing = svg("svg", { class: "chart", "aria-hidden": "true", focusable: "false" });
  const cursor = svg("line", { class: "cursor", y1: 0, visibility: "hidden" });
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const node = el("div", { class: "chart-frame", tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": label }, drawing);
  const holder = el("div", { class: "chart-holder" }, node, readout);
  const state = { places: [], at: -1, item: null, wanted: 0, width: 0 };

  function redraw() {
    const width = Math.max(260, Math.floor(node.clientWidth));
    const tall = height();
    const group = svg("g");
    drawing.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    drawing.setAttribute("width", width);
    drawing.setAttribute("height", tall);
    state.width = width;
    state.places = draw(group, width).places;
    cursor.setAttribute("y2", tall);
    drawing.replaceChildren(group, cursor);
    const again = state.item === null ? -1 : state.places.findIndex((place) => place.item === state.item);
    if (again >= 0) point(again);
    else rest();
  }

  function update() {
    if (!state.wanted) state.wanted = requestAnimationFrame(() => { state.wanted = 0; if (node.isConnected) redraw(); });
  }

  function point(index) {
    if (index === state.at && state.item === state.places[index].item && cursor.getAttribute("visibility") === "visible") return;
    state.at = index;
    const place = state.places[index];
    state.item = place.item;
    cursor.setAttribute("x1", place.x);
    cursor.setAttribute("x2", place.x);
    cursor.setAttribute("visibility", "visible");
    replace(readout, describe(place.item));
  }

  function rest() {
    state.at = -1;
    state.item = null;
    cursor.setAttribute("visibility", "hidden");
    replace(readout, el("span", { class: "hint" }, hint));
  }

  function nearest(x) {
    let best = -1;
    state.places.forEach((place, index) => {
      if (best < 0 || Math.abs(place.x - x) < Math.abs(state.places[best].x - x)) best = index;
    });
    return best;
  }

  node.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const index = nearest(((event.clientX - box.left) / box.width) * state.width);
    if (index >= 0) point(index);
  });
  node.addEventListener("pointerleave", () => { if (document.activeElement !== node) rest(); });
  node.addEventListener("click", () => { if (state.item) open(state.item); });
  node.addEventListener("keydown", (event) => {
    const last = state.places.length - 1;
    if (last < 0) return;
    const from = state.at < 0 ? last + 1 : state.at;
    const moves = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, PageUp: from - 10, PageDown: from + 10 };
    if (event.key in moves) point(Math.max(0, Math.min(last, moves[event.key])));
    else if (event.key === "Enter" && state.item) open(state.item);
    else if (event.key === "Escape") rest();
    else return;
    event.preventDefault();
  });
  new ResizeObserver(update).observe(node);
  update();
  return { node: holder, update };
}
