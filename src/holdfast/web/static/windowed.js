// A long table of which only the rows in sight exist: 100,000 rows cost as much as 50. Real table markup, roving tab index.

import { el } from "./dom.js";

const MARGIN_ROWS = 8;

// columns: [{label, class, title}]; draw(index) returns the cells of a row as {attributes, cells};
// act(event, index) handles a key or click on a row and returns true if it did.
export function windowedTable({ label, columns, rowHeight, draw, act, role, empty, tallest }) {
  const head = el("tr", null, columns.map((column) => el("th", { scope: "col", class: column.class, title: column.title }, column.label)));
  const body = el("tbody");
  const table = el("table", { "aria-label": label, role, class: "windowed-table" },
    el("colgroup", null, columns.map((column) => el("col", { class: column.class }))), el("thead", null, head), body);
  const nothing = el("p", { class: "empty", hidden: true }, empty);
  const node = el("div", { class: "windowed", style: { "--row": `${rowHeight}px`, "max-height": tallest || "min(62vh, 640px)" } }, table, nothing);
  const state = { count: 0, first: -1, last: -1, current: 0, rows: new Map() };

  function setCount(count, { insertedAbove = 0 } = {}) {
    const keep = insertedAbove && node.scrollTop > 0;
    state.count = count;
    if (insertedAbove) state.current = Math.min(state.current + insertedAbove, Math.max(0, count - 1));
    state.current = Math.min(state.current, Math.max(0, count - 1));
    table.setAttribute("aria-rowcount", String(count + 1));
    nothing.hidden = count > 0;
    refresh();
    if (keep) {
      node.scrollTop += insertedAbove * rowHeight;
      refresh();
    }
  }

  function refresh() {
    state.first = -1;
    arrange();
  }

  function arrange() {
    const visibleRows = Math.ceil((node.clientHeight || 600) / rowHeight);
    const top = Math.floor(node.scrollTop / rowHeight);
    const first = Math.max(0, Math.min(top, state.count - visibleRows) - MARGIN_ROWS);
    const last = Math.min(state.count, top + visibleRows + MARGIN_ROWS);
    if (first === state.first && last === state.last) return;
    Object.assign(state, { first, last });
    const focused = body.contains(document.activeElement);
    state.rows = new Map();
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(row(index));
    body.replaceChildren(spacer(first), ...rows, spacer(state.count - last));
    if (focused) focusRow(state.current, true);
  }

  function row(index) {
    const { attributes, cells } = draw(index);
    const tab = index === state.current || (index === state.first && !inSight(state.current)) ? 0 : -1;
    const drawn = el("tr", { ...attributes, tabindex: tab, "aria-rowindex": index + 2, "data-index": index }, cells);
    state.rows.set(index, drawn);
    return drawn;
  }

  function spacer(rows) {
    if (rows <= 0) return [];
    return el("tr", { class: "spacer", "aria-hidden": "true", style: { height: `${rows * rowHeight}px` } }, el("td", { colspan: columns.length }));
  }

  function inSight(index) {
    return index >= state.first && index < state.last;
  }

  function show(index) {
    const above = table.tHead.offsetHeight;
    const top = index * rowHeight;
    if (top < node.scrollTop) node.scrollTop = top;
    else if (top + rowHeight + above > node.scrollTop + node.clientHeight) node.scrollTop = top + rowHeight + above - node.clientHeight;
    arrange();
  }

  function focusRow(index, quietly) {
    if (!state.count) return;
    state.rows.get(state.current)?.setAttribute("tabindex", "-1");
    state.current = Math.max(0, Math.min(index, state.count - 1));
    if (!quietly) show(state.current);
    const target = state.rows.get(state.current);
    if (!target) return;
    target.setAttribute("tabindex", "0");
    target.focus({ preventScroll: true });
  }

  function moved(key) {
    const page = Math.max(1, Math.floor(node.clientHeight / rowHeight) - 2);
    const places = { ArrowDown: state.current + 1, ArrowUp: state.current - 1, PageDown: state.current + page, PageUp: state.current - page, Home: 0, End: state.count - 1 };
    return key in places ? places[key] : null;
  }

  node.addEventListener("scroll", () => requestAnimationFrame(arrange), { passive: true });
  new ResizeObserver(() => requestAnimationFrame(arrange)).observe(node);
  body.addEventListener("keydown", (event) => {
    if (event.target.tagName !== "TR" || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = moved(event.key);
    if (place !== null) focusRow(place);
    else if (!act(event, state.current)) return;
    event.preventDefault();
  });
  body.addEventListener("click", (event) => {
    const clicked = event.target.closest("tr[data-index]");
    if (!clicked || event.target.closest("a, button, input, label")) return;
    focusRow(Number(clicked.dataset.index), true);
    act(event, Number(clicked.dataset.index));
  });
  const setEmpty = (text) => { nothing.textContent = text; };
  return { node, setCount, setEmpty, refresh, focusRow, show, current: () => state.current };
}
