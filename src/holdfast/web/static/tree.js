// The tree of tensors: a windowed tree grid, folded by layer, searched on the server.

import { el, replace } from "./dom.js";
import { failed } from "./parts.js";
import { count, size, visible, whole } from "./text.js";
import { branch, childOf, flattened, largestFolder, numbersText, readPage, unfoldable } from "./tree_model.js";
import { windowedTable } from "./windowed.js";

const COLUMNS = [
  { label: "Tensor", class: "c-key" }, { label: "Shape", class: "c-shape" }, { label: "Type", class: "c-dtype" }, { label: "Size", class: "c-num" },
  { label: "File", class: "c-file wide-only" }, { label: "Blocks", class: "c-num wide-only" },
];
const SEARCH_WAIT_MS = 200;

// fetchRows(query) asks the server; onTensor(row, group) is called for the row that was opened.
export function tensorTree({ groups, group, filter, fetchRows, onTensor, changed, signal }) {
  const state = { group, filter: filter || "", fold: 1, root: null, entries: [], selected: null };
  const table = windowedTable({ label: "Tensors", role: "treegrid", rowHeight: 32, columns: COLUMNS, empty: "No tensor has such a key.", draw, act });
  const search = el("input", { type: "search", class: "search wide", placeholder: "Search keys", "aria-label": "Search keys", value: state.filter, spellcheck: "false" });
  const total = el("span", { class: "note", role: "status" });
  const problem = el("div");
  const tabs = el("div", { class: "chips", role: "group", "aria-label": "Group" });
  const folding = el("button", { type: "button", class: "chip", "aria-pressed": "true", title: "Layers that are alike are shown once", onclick: () => { state.fold = 1 - state.fold; folding.setAttribute("aria-pressed", String(Boolean(state.fold))); restart(); } }, "fold layers");
  const node = el("div", { class: "tree" }, el("div", { class: "filters" }, tabs, search, folding, total), problem, table.node);

  function restart() {
    state.root = branch(state.group, "", 0, state.fold);
    state.entries = [];
    table.node.scrollTop = 0;
    read(state.root, 0).then(() => state.filter || unfoldLargest(state.root, 2));
    update();
  }

  // The first look shows the layers: the largest folder is unfolded, and the largest in it.
  async function unfoldLargest(branchNode, levels) {
    const index = largestFolder(branchNode.rows);
    if (index < 0 || !levels || branchNode.open.size) return;
    const child = childOf(branchNode, index);
    branchNode.open.set(index, child);
    await read(child, 0);
    await unfoldLargest(child, levels - 1);
  }

  async function read(branchNode, index) {
    const root = state.root;
    try {
      const asked = { ...(state.filter ? { filter: state.filter } : {}) };
      if (await readPage(branchNode, index, (query) => fetchRows({ ...query, ...asked }, signal))) {
        if (root === state.root) update();
      }
    } catch (error) {
      if (error.name !== "AbortError") replace(problem, failed(error));
    }
  }

  function update() {
    state.entries = flattened(state.root);
    const known = state.root.total;
    replace(problem, state.root.error ? failed(state.root.error, restart) : null);
    replace(total, known === null ? "reading …" : state.filter ? `${whole(known)} found` : "");
    table.setCount(state.entries.length);
  }

  function draw(index) {
    const entry = state.entries[index];
    if (!entry.row) {
      if (!entry.error) read(entry.node, entry.index);
      return { attributes: { class: "waiting", "aria-busy": "true" }, cells: [el("td", { class: "c-key", colspan: COLUMNS.length, style: indent(entry) }, entry.error ? visible(entry.error.message) : "…")] };
    }
    const open = entry.node.open.has(entry.index);
    const fold = unfoldable(entry.row);
    const selected = state.selected !== null && entry.row.key === state.selected;
    return { attributes: { class: `linked ${entry.row.kind}${selected ? " selected" : ""}`, "aria-level": entry.depth + 1, "aria-expanded": fold ? String(open) : null, "aria-selected": String(selected), "aria-posinset": entry.index + 1, "aria-setsize": entry.node.total },
      cells: cellsOf(entry, open, fold, Boolean(state.filter)) };
  }

  function act(event, index) {
    const entry = state.entries[index];
    if (!entry || !entry.row) return false;
    const open = entry.node.open.has(entry.index);
    if (event.type === "keydown") {
      if (event.key === "ArrowRight" && unfoldable(entry.row)) return open ? go(index + 1) : toggle(entry);
      if (event.key === "ArrowLeft") return open ? toggle(entry) : go(parentOf(index));
      if (event.key !== "Enter" && event.key !== " ") return false;
    }
    if (unfoldable(entry.row)) return toggle(entry);
    select(entry.row);
    return true;
  }

  function select(row) {
    state.selected = row.key;
    table.refresh();
    onTensor(row, state.group);
  }

  function go(index) {
    if (index >= 0) table.focusRow(index);
    return true;
  }

  function parentOf(index) {
    const depth = state.entries[index].depth;
    for (let place = index - 1; place >= 0; place -= 1) if (state.entries[place].depth < depth) return place;
    return -1;
  }

  function toggle(entry) {
    if (!entry.node.open.delete(entry.index)) {
      const child = childOf(entry.node, entry.index);
      entry.node.open.set(entry.index, child);
      read(child, 0);
    }
    update();
    return true;
  }

  function drawTabs() {
    replace(tabs, groups.map((entry) => el("button", { type: "button", class: "chip", "aria-pressed": String(entry.name === state.group), onclick: () => { state.group = entry.name; state.selected = null; drawTabs(); tabs.querySelector("[aria-pressed=true]").focus(); tell(); restart(); } },
      visible(entry.name), typeof entry.keys === "number" ? el("span", { class: "chip-count" }, ` ${whole(entry.keys)}`) : null)));
  }

  function tell() {
    changed({ group: state.group, filter: state.filter || null });
  }

  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.filter = search.value; tell(); restart(); }, SEARCH_WAIT_MS);
  });
  drawTabs();
  restart();
  return { node, mark: (key) => { state.selected = key; table.refresh(); } };
}

function cellsOf(entry, open, fold, flat) {
  const row = entry.row;
  const several = row.kind === "folded" && row.alike && row.alike.length > 1;
  const name = flat && row.key ? row.key : several ? numbersText(row.alike) : row.name;
  const twist = el("span", { class: "twist", "aria-hidden": "true" }, fold ? (open ? "▾" : "▸") : "");
  const alike = several ? el("span", { class: "alike" }, ` ${count(row.alike.length, "alike", "alike")}`) : null;
  return [
    el("td", { class: "c-key", style: indent(entry), title: visible(row.key || row.prefix || row.name) }, twist, el("span", { class: "key" }, name === "" ? "(empty)" : visible(name)), alike),
    el("td", { class: "c-shape" }, row.shape ? shapeText(row.shape) : row.tensors ? el("span", { class: "sub" }, `${count(row.tensors, "tensor")}${several ? " each" : ""}`) : ""),
    el("td", { class: "c-dtype" }, visible(row.dtype || "")),
    el("td", { class: "c-num" }, row.bytes === null || row.bytes === undefined ? "" : several ? `${row.alike.length} × ${size(row.bytes)}` : size(row.bytes)),
    el("td", { class: "c-file wide-only", title: visible(row.file || "") }, visible(row.file || "")),
    el("td", { class: "c-num wide-only" }, row.blocks === null || row.blocks === undefined ? "" : Array.isArray(row.blocks) ? row.blocks.length : whole(row.blocks)),
  ];
}

export function shapeText(shape) {
  return shape.length ? shape.map(String).join(" × ") : "scalar";
}

function indent(entry) {
  return { "--depth": String(Math.min(entry.depth, 12)) };
}
