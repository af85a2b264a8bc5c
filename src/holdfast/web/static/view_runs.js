// All runs under the roots.

import { get, isReport } from "./data.js";
import { el, replace } from "./dom.js";
import { badge, crumbs, empty } from "./parts.js";
import { runRoute, stepRoute } from "./routes.js";
import { ago, at, count, size, stepName, visible, whole } from "./text.js";
import { windowedTable } from "./windowed.js";

const AGAIN_MS = 5000;
const KINDS = { root: "run", training: "training run", checkpoint: "checkpoint" };

export async function runsView(main, route, signal) {
  crumbs([["Runs", null]]);
  const first = await get("/api/runs", null, signal);
  const state = { all: first.runs, text: route.options.q || "" };
  const title = el("p", { class: "lede" });
  const table = runsTable(state);
  const search = el("input", { type: "search", class: "search", placeholder: "Filter by name", "aria-label": "Filter runs by name", value: state.text });
  search.addEventListener("input", () => { state.text = search.value; show(); });
  const body = el("div", null);
  replace(main, el("div", { class: "page-head" }, el("h1", null, "Runs"), title), body);

  function show() {
    const needle = state.text.toLowerCase();
    state.shown = state.all.filter((run) => `${run.name} ${run.address}`.toLowerCase().includes(needle));
    const saving = state.all.filter((run) => run.in_flight).length;
    replace(title, state.all.length ? `${count(state.all.length, "run")}${saving ? `, ${whole(saving)} of them saving now` : ""}.` : "");
    if (!state.all.length) replace(body, empty("There is no run here yet. The page shows the first step as soon as one is saved."));
    else if (!table.node.isConnected) replace(body, state.all.length > 8 ? search : null, table.node);
    table.setCount(state.shown.length);
  }

  state.shown = [];
  show();
  if (!isReport()) again(state, show, signal);
}

function again(state, show, signal) {
  const timer = setInterval(async () => {
    if (document.hidden) return;
    try {
      const now = JSON.stringify(state.all);
      const { runs } = await get("/api/runs", null, signal);
      if (JSON.stringify(runs) === now) return;
      state.all = runs;
      show();
    } catch {
      return; // the next turn tries again; the list in sight stays
    }
  }, AGAIN_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function runsTable(state) {
  const table = windowedTable({
    label: "Runs",
    rowHeight: 58,
    empty: "No run has such a name.",
    tallest: "78vh",
    columns: [{ label: "Run" }, { label: "Newest step", class: "c-newest" }, { label: "Steps", class: "c-num wide-only" }, { label: "Size", class: "c-num" }],
    draw: (index) => runRow(state.shown[index]),
    act: (event, index) => {
      if (event.type === "keydown" && event.key !== "Enter") return false;
      location.hash = routeOf(state.shown[index]);
      return true;
    },
  });
  return table;
}

function runRow(run) {
  const when = run.newest_created ? el("span", { class: "sub", title: at(run.newest_created) }, ago(run.newest_created, Date.now())) : null;
  return { attributes: { class: "linked" }, cells: [
    el("td", null, el("div", { class: "name-line" }, el("a", { class: "name", href: routeOf(run), tabindex: -1 }, visible(run.name)),
      run.in_flight ? badge("saving", "live") : null, run.problem ? el("span", { title: visible(run.problem) }, badge(run.problem, "bad")) : null, run.kind === "root" ? null : badge(KINDS[run.kind] || run.kind)),
    el("span", { class: "sub address" }, visible(run.address))),
    el("td", { class: "c-newest" }, run.newest === null || run.newest === undefined ? "–" : [el("div", null, typeof run.newest === "number" ? `step ${whole(run.newest)}` : stepName(run.newest)), when]),
    el("td", { class: "c-num wide-only" }, whole(run.steps)),
    el("td", { class: "c-num" }, size(run.bytes)),
  ] };
}

function routeOf(run) {
  return run.kind === "checkpoint" ? stepRoute(run.id, "self") : runRoute(run.id);
}
