// The table of a run's steps: windowed, filtered, two of them chosen for a comparison.

import { el, replace } from "./dom.js";
import { meaning } from "./glossary.js";
import { badge } from "./parts.js";
import { GONE_UNSEEN, matches } from "./run_model.js";
import { compareRoute, stepRoute } from "./routes.js";
import { ago, at, count, duration, milliseconds, ruleWords, size, stepName, visible } from "./text.js";
import { windowedTable } from "./windowed.js";

const FILTERS = ["all", "committed", "verified", "damaged", "set aside", "tagged"];
const STATES = { committed: ["committed", "unread"], damaged: ["damaged", "bad"], abandoned: ["abandoned", "aside"], left_behind: ["left behind", "aside"] };
const COLUMNS = [
  { label: "Step", class: "c-step" }, { label: "State", class: "c-state" }, { label: "Saved", class: "c-when" }, { label: "Size", class: "c-num" },
  { label: "Publish", class: "c-num", title: meaning("publish") }, { label: "Stall", class: "c-num", title: meaning("stall") },
  { label: "Branch", class: "c-num c-branch", title: meaning("branch") }, { label: "Notes", class: "c-note" },
];

// The word for a step's state and its kind for the stylesheet. Only a verification reads every byte again.
export function stateOf(row) {
  if (row.verified) return ["verified", "good"];
  return STATES[row.state] || [row.state, ""];
}

// `model()` gives {id, rows, leaving, staying}; `changed(options)` is told of the filter for the address.
export function stepsTable(model, options, changed) {
  const state = { shown: [], filter: FILTERS.includes(options.filter) ? options.filter : "all", text: options.q || "", chosen: new Set() };
  const table = windowedTable({ label: "Steps, newest first", rowHeight: 38, columns: COLUMNS, empty: "", draw: (index) => row(state.shown[index], model(), state), act });
  table.node.classList.add("steps");
  const search = el("input", { type: "search", class: "search", placeholder: "Step, folder or tag", "aria-label": "Filter steps by number, folder or tag", value: state.text });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Show" });
  const bar = el("div", { class: "choice", role: "status" });
  const words = el("span", { class: "note" });
  const node = el("div", null, el("div", { class: "filters" }, chips, search, words), table.node, bar);

  function act(event, index) {
    const entry = state.shown[index];
    if (event.type === "keydown" && event.key === " ") toggle(entry.folder);
    else if (event.type === "click" || event.key === "Enter") location.hash = stepRoute(model().id, entry.folder);
    else return false;
    return true;
  }

  function toggle(folder) {
    if (!state.chosen.delete(folder)) state.chosen.add(folder);
    if (state.chosen.size > 2) state.chosen.delete(state.chosen.values().next().value);
    table.refresh();
    drawBar();
  }

  function drawBar() {
    const names = [...state.chosen];
    if (!names.length) return void replace(bar);
    const clear = el("button", { type: "button", class: "quiet", onclick: () => { state.chosen.clear(); table.refresh(); drawBar(); } }, "clear");
    if (names.length === 1) return void replace(bar, `${stepName(names[0])} is chosen; choose another to compare. `, clear);
    replace(bar, el("a", { class: "button", href: address() }, `Compare ${stepName(older()[0])} with ${stepName(older()[1])}`), clear);
  }

  function older() {
    const order = new Map(model().rows.map((entry, index) => [entry.folder, index]));
    return [...state.chosen].sort((a, b) => order.get(b) - order.get(a));
  }

  function address() {
    const [a, b] = older();
    return compareRoute({ run: model().id, step: a }, { run: model().id, step: b });
  }

  function drawChips() {
    const counts = Object.fromEntries(FILTERS.map((name) => [name, model().rows.filter((entry) => matches(entry, name, "")).length]));
    replace(chips, FILTERS.filter((name) => name === "all" || counts[name] || name === state.filter).map((name) =>
      el("button", { type: "button", class: "chip", "aria-pressed": String(name === state.filter), onclick: () => { state.filter = name; tell(); update(); chips.querySelector("[aria-pressed=true]").focus(); } }, `${name} `, el("span", { class: "chip-count" }, counts[name].toLocaleString("en-US")))));
  }

  // Rows that arrive above those in sight leave them where they are.
  function update() {
    const before = state.shown[0];
    state.shown = model().rows.filter((entry) => matches(entry, state.filter, state.text));
    const place = before ? state.shown.findIndex((entry) => entry.folder === before.folder) : 0;
    table.node.classList.toggle("one-branch", model().rows.every((entry) => !entry.branch));
    table.setEmpty(emptyText());
    table.setCount(state.shown.length, { insertedAbove: Math.max(0, place) });
    drawChips();
    drawBar();
    replace(words, state.text ? count(state.shown.length, "step") : "");
  }

  function emptyText() {
    const wanted = Number(state.text.replace(/,/g, ""));
    const gone = state.text && (model().gone || []).find((step) => step.step === wanted);
    if (gone) return `Step ${wanted.toLocaleString("en-US")} is gone: ${ruleWords(gone.why)}.`;
    const newest = model().rows[0];
    return state.text && newest && Number.isInteger(wanted) && wanted < newest.step ? `Step ${wanted.toLocaleString("en-US")} is not here: it was ${GONE_UNSEEN}, or never saved.` : "No step fits the filter.";
  }

  function tell() {
    changed({ filter: state.filter === "all" ? null : state.filter, q: state.text || null });
  }

  search.addEventListener("input", () => { state.text = search.value.trim(); tell(); update(); });
  // `toggle` is bound to the boxes by delegation: the rows come and go.
  table.node.addEventListener("change", (event) => event.target.matches("input[data-folder]") && toggle(event.target.dataset.folder));
  const compareChosen = () => { if (state.chosen.size === 2) location.hash = address(); };
  return { node, update, compareChosen, refresh: table.refresh };
}

function row(entry, now, state) {
  const name = stepName(entry.folder);
  const [word, kind] = stateOf(entry);
  const box = el("input", { type: "checkbox", tabindex: -1, "data-folder": entry.folder, "aria-label": `Choose ${name}` });
  box.checked = state.chosen.has(entry.folder);
  const going = now.leaving.get(entry.folder);
  return { attributes: { class: `linked ${kind}`, "aria-selected": String(box.checked) }, cells: [
    el("td", { class: "c-step" }, box, el("a", { class: "name", href: stepRoute(now.id, entry.folder), tabindex: -1 }, name)),
    el("td", { class: "c-state" }, going === undefined ? badge(word, kind) : [el("span", { class: "desk-only" }, badge(word, kind)), el("span", { class: "phone-only" }, badge("goes next", "going"))]),
    el("td", { class: "c-when", title: at(entry.created) }, entry.created ? ago(entry.created, Date.now()) : "–"),
    el("td", { class: "c-num" }, size(entry.bytes)),
    el("td", { class: "c-num" }, duration(entry.seconds)),
    el("td", { class: "c-num" }, milliseconds(entry.stall_ms)),
    el("td", { class: "c-num c-branch" }, entry.branch ?? "–"),
    el("td", { class: "c-note" }, (entry.tags || []).map((tag) => badge(tag, "tag")), going !== undefined ? badge("goes next", "going") : null, noteOf(entry, now, going)),
  ] };
}

function noteOf(entry, now, going) {
  const text = ruleWords(entry.note || going || now.staying.get(entry.folder) || "");
  return el("span", { class: "sub", title: text }, text);
}
