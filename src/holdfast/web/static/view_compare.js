// Two checkpoints: what changed, where, and by how much; also a step against a hub folder through a mapping.

import { get, isReport, runAddress, stepAddress } from "./data.js";
import { mostChanged, number, percent, strongest } from "./comparison.js";
import { el, replace } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { runJob } from "./jobs.js";
import { announce, crumbs, empty, facts, failed, progressBar, section, shortTable } from "./parts.js";
import { compareRoute, parseSide, sideText, stepRoute } from "./routes.js";
import { goneText, newestIntact, rowsOf, stepBefore } from "./run_model.js";
import { count, list, size, stepName, value, visible, whole } from "./text.js";

export async function compareView(main, route, signal) {
  crumbs([["Runs", "#/"], ["Compare", null]]);
  const result = el("div", { class: "comparison" });
  if (isReport()) {
    const stored = await get("/api/compare");
    replace(main, el("div", { class: "page-head" }, el("h1", null, "What changed")), result);
    showResult(result, stored.result, stored, signal);
    return null;
  }
  const { runs } = await get("/api/runs", null, signal);
  const about = await get("/api/about", null, signal).catch(() => ({}));
  const form = chooser(runs, about, route.options, signal);
  replace(main, el("div", { class: "page-head" }, el("h1", null, "What changed")), form.node, result);
  const sides = await form.ready;
  const absent = sides.a?.absent || sides.b?.absent;
  if (absent) replace(result, failed(new Error(absent)));
  else if (sides.a && sides.b) {
    form.offerGroups(sides.b).catch(() => undefined);
    compare(result, { ...sides, mapping: route.options.mapping || null, group: route.options.group }, signal);
  }
  else replace(result, empty(runs.length ? "Choose two checkpoints, the older one first." : "There is no run here yet."));
  return null;
}

// Two fields for each side: a run, and a step of it.
function chooser(runs, about, options, signal) {
  const first = side("From", runs, parseSide(options.a) || besideOf(parseSide(options.b)), signal, false);
  const second = side("To", runs, parseSide(options.b) || parseSide(options.a), signal, true);
  const mapping = el("input", { class: "search", id: "mapping", list: "mappings", placeholder: "none: keys are the same", value: options.mapping || "", spellcheck: "false" });
  const group = el("select", { id: "group" });
  const node = el("form", { class: "chooser" }, first.node, second.node,
    el("div", { class: "side" }, el("label", { for: "mapping" }, "Mapping"), mapping, el("datalist", { id: "mappings" }, (about.mappings || []).map((name) => el("option", { value: name })))),
    el("div", { class: "side", hidden: true }, el("label", { for: "group" }, "Group"), group), el("button", { class: "button" }, "Compare"));
  node.addEventListener("submit", (event) => {
    event.preventDefault();
    const address = compareRoute(first.chosen(), second.chosen(), { mapping: mapping.value.trim(), group: group.selectedIndex > 0 ? group.value : null });
    if (address === location.hash) window.dispatchEvent(new HashChangeEvent("hashchange"));
    else location.hash = address;
  });
  const ready = Promise.all([first.ready, second.ready]).then(([a, b]) => ({ a: options.a ? a : null, b: options.b ? b : null }));
  // A checkpoint of several groups, such as weights and an optimizer's state, is compared one group at a time.
  async function offerGroups(chosen) {
    const step = await get(stepAddress(chosen.run, chosen.step), null, signal);
    const names = (step.groups || []).map((entry) => entry.name).sort((a, b) => (b === "model") - (a === "model"));
    replace(group, names.map((name) => el("option", { value: name }, visible(name))));
    if (names.includes(options.group)) group.value = options.group;
    group.parentNode.hidden = names.length < 2;
  }
  return { node, ready, offerGroups };
}

function side(label, runs, chosen, signal, newest) {
  const name = `side-${label.toLowerCase()}`;
  const run = el("select", { id: `${name}-run`, "aria-label": `${label}: run` }, runs.map((entry) => el("option", { value: entry.id }, visible(entry.name))));
  const step = el("select", { id: `${name}-step`, "aria-label": `${label}: step` });
  let rows = [];
  if (chosen && runs.some((entry) => entry.id === chosen.run)) run.value = chosen.run;
  async function fill(wanted) {
    const entry = runs.find((one) => one.id === run.value);
    if (!entry) return null;
    const answer = entry.kind === "checkpoint" ? null : await get(runAddress(entry.id), null, signal);
    rows = answer ? rowsOf(answer) : [{ folder: "self", step: null, state: "committed" }];
    const intact = newestIntact(rows);
    const before = stepBefore(rows, intact);
    replace(step, rows.map((row) => el("option", { value: row.folder }, `${stepName(row.folder)}${row.state === "committed" ? "" : ` (${visible(row.state)})`}`)));
    if (wanted && !rows.some((row) => row.folder === wanted)) return { absent: goneText(wanted, rows, answer) };
    const start = rows.some((row) => row.folder === wanted) ? wanted : ((newest ? intact : before) || intact || rows[0] || {}).folder;
    if (start) step.value = start;
    return start ? { run: run.value, step: start } : null;
  }
  run.addEventListener("change", () => fill(null).catch(() => undefined));
  return {
    node: el("div", { class: "side" }, el("label", { for: `${name}-run` }, label), run, step),
    ready: fill(chosen && chosen.step),
    chosen: () => (run.value && step.value ? { run: run.value, step: step.value } : null),
  };
}

function besideOf(chosen) {
  return chosen && { run: chosen.run, step: null };
}

async function compare(node, wanted, viewSignal) {
  const job = new AbortController();
  viewSignal.addEventListener("abort", () => job.abort(), { once: true });
  const bar = progressBar("Comparison");
  const again = () => compare(node, wanted, viewSignal);
  replace(node, bar.node, el("button", { type: "button", class: "quiet", onclick: () => job.abort() }, "cancel"));
  try {
    const result = await runJob("/api/compare", { ...wanted, what: "heatmap" }, (state) => bar.update(state.done, state.total, visible(state.text || "")), job.signal);
    if (viewSignal.aborted) return;
    showResult(node, result, wanted, viewSignal);
    announce(headline(result));
  } catch (error) {
    if (viewSignal.aborted) return;
    replace(node, job.signal.aborted ? el("p", { class: "empty" }, "Cancelled. ", el("button", { type: "button", class: "button", onclick: again }, "Compare again")) : failed(error, again));
  }
}

function showResult(node, result, sides, signal) {
  const link = (one) => el("a", { href: stepRoute(one.run, one.step) }, stepName(one.step));
  replace(node,
    el("p", { class: "lede big" }, headline(result)), el("p", { class: "note" }, "From ", link(sides.a), " to ", link(sides.b), ". A layer's change is the norm of the change of all its tensors, by their norm before."),
    result.partial ? el("p", { class: "warn" }, "The time limit was reached: this is what was compared until then.") : null,
    facts([["Unchanged", whole(result.same)], ["Changed", whole(result.changed)], ["Added", whole(result.added_count ?? length(result.added))], ["Missing", whole(result.missing_count ?? length(result.missing))], ["Reshaped", whole(length(result.reshaped))]]),
    (result.layers || []).length ? section("Layers", "Tensors down, layers across; the stronger the color, the larger the change.", heatmap(result, signal), layersTable(result)) : null,
    problemsSection(result.problems || []), tensorsSection(result),
    names("Added", result.added, "Only in the second."), names("Missing", result.missing, "Only in the first."), names("Reshaped", result.reshaped, "Another shape or type."), stateSection(result.state || []));
}

function headline(result) {
  const most = mostChanged(result, 3);
  const unread = result.unread ?? length(result.problems);
  if (!result.same && !result.changed) {
    if (unread) return `${count(unread, "tensor")} could not be read: nothing was compared.`;
    if (!length(result.added) && !length(result.missing) && !length(result.reshaped)) return "Neither has a tensor to compare.";
    return "No tensor is in both with the same shape.";
  }
  if (!result.changed && !length(result.added) && !length(result.missing) && !length(result.reshaped) && unread) return `${count(result.same, "tensor is", "tensors are")} equal bit for bit; ${count(unread, "tensor")} could not be read.`;
  if (!result.changed && !length(result.added) && !length(result.missing) && !length(result.reshaped)) return `Nothing changed: ${count(result.same, "tensor is", "tensors are")} equal bit for bit.`;
  if (!most.length) return `${count(result.changed, "tensor")} changed.`;
  return `Changed most: ${list(most.map((entry) => `${visible(entry.name)} (${finite(entry.change)})`), 3)}.${unread ? ` ${count(unread, "tensor")} could not be read.` : ""}`;
}

function finite(change) {
  return percent(Number.isFinite(change) ? change : "Infinity");
}

function layersTable(result) {
  const rows = result.layers.map((layer, index) => {
    const cells = result.cells[index] || [];
    const best = cells.reduce((most, cell, place) => (number(cell) > number(cells[most] ?? 0) ? place : most), 0);
    return { layer, change: number(result.layer_changes[index]), largest: strongest(cells), name: result.columns[best] };
  }).sort((a, b) => b.change - a.change);
  return el("details", null, el("summary", null, "as a table, layers that changed most first"),
    shortTable("Layers by change", [{ label: "Layer" }, { label: "Change", class: "c-num" }, { label: "Most in the tensor", class: "c-key" }, { label: "Its change", class: "c-num" }],
      rows.map((row) => [visible(row.layer), finite(row.change), row.change ? visible(row.name) : "–", finite(row.largest)]), 16));
}

// The tensors that changed most, and those that are in no layer.
function tensorsSection(result) {
  const listed = new Map([...(result.rest || []), ...(result.most_changed || [])].map((row) => [row.key, { ...row, relative: row.relative ?? "Infinity" }]));
  const sorted = [...listed.values()].sort((a, b) => number(b.relative) - number(a.relative));
  if (!sorted.length) return null;
  return section("Tensors", "Those that changed most, and those outside the layers.", shortTable("Differences", [{ label: "Tensor", class: "c-key" }, { label: "Relative", class: "c-num" }, { label: "Largest difference", class: "c-num" }],
    sorted.map((row) => [visible(row.key), percent(row.relative), value(row.max_abs)]), 12));
}

function problemsSection(problems) {
  if (!problems.length) return null;
  return section("Not read", "Tensors that could not be compared.", shortTable("Not read", [{ label: "Tensor", class: "c-key" }, { label: "Why", class: "c-note" }],
    problems.map((one) => [visible(one.key ?? ""), visible(one.text ?? one.message ?? one.what ?? JSON.stringify(one))]), 12));
}

function stateSection(differences) {
  if (!differences.length) return null;
  return section("State", "What differs in state.json.", shortTable("State", [{ label: "Entry", class: "c-key" }, { label: "First", class: "c-key" }, { label: "Second", class: "c-key" }],
    differences.map((one) => [`${visible(one.key)}: ${visible(one.what)}`, visible(one.first ?? "–"), visible(one.second ?? "–")]), 12));
}

function names(title, keys, note) {
  if (!length(keys)) return null;
  return section(title, note, shortTable(title, [{ label: "Tensor", class: "c-key" }], keys.map((key) => [visible(typeof key === "string" ? key : key.key || JSON.stringify(key))]), 16));
}

function length(keys) {
  return (keys || []).length;
}
