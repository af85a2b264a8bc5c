// One checkpoint: what it is, its tensors, the state beside them, where it came from, whether it is intact.

import { allowed, tagPanel } from "./changes.js";
import { get, isReport, runAddress, stepAddress } from "./data.js";
import { el, replace } from "./dom.js";
import { setShortcuts } from "./help.js";
import { badge, crumbs, empty, facts, failed, jsonTree, section, shortTable } from "./parts.js";
import { goneText, leaving, rowsOf, staying, stepBefore } from "./run_model.js";
import { compareRoute, layoutRoute, runRoute, stepRoute } from "./routes.js";
import { stateOf } from "./steps_table.js";
import { ago, at, count, list, ruleWords, size, stepName, value, visible, whole } from "./text.js";
import { tensorPanel } from "./tensor_panel.js";
import { tensorTree } from "./tree.js";
import { withVerdicts } from "./verdicts.js";
import { verifyPanel } from "./verify_panel.js";

export async function stepView(main, route, signal) {
  const run = await get(runAddress(route.run), null, signal).catch(() => null);
  const rows = run ? rowsOf(run) : [];
  const row = rows.find((entry) => entry.folder === route.step) || null;
  const alone = run && run.kind === "checkpoint";
  const name = alone ? visible(run.name) : stepName(route.step);
  crumbs([["Runs", "#/"], alone ? null : [run ? visible(run.name) : "run", runRoute(route.run)], [name, null]].filter(Boolean));
  const state = el("p", { class: "lede" });
  const drawState = () => row && replace(state, stateLine(withVerdicts(route.run, [row])[0]));
  const head = el("div", { class: "page-head" }, el("h1", null, name), state);
  drawState();
  let step;
  try {
    step = await get(stepAddress(route.run, route.step), null, signal);
  } catch (error) {
    if (signal.aborted) throw error;
    const absent = run && !row && !alone && error.status === 404;
    replace(main, head, failed(absent ? new Error(ruleWords(goneText(route.step, rows, run))) : error), absent ? el("p", null, el("a", { href: runRoute(route.run) }, `All steps of ${visible(run.name)}`)) : null, row && row.note ? el("p", { class: "warn" }, visible(row.note)) : null);
    return null;
  }
  return drawStep(main, { route, run, rows, row, step, head, drawState, signal });
}

async function drawStep(main, { route, run, rows, row, step, head, drawState, signal }) {
  const options = { ...route.options };
  const remember = (changed, leap) => {
    Object.assign(options, changed);
    const address = stepRoute(route.run, route.step, options);
    if (leap && address !== location.hash) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  };
  const panel = tensorPanel(route.run, route.step, signal);
  const groups = step.groups || [];
  const group = groups.some((entry) => entry.name === options.group) ? options.group : (groups[0] || {}).name;
  const tree = group === undefined ? empty("This checkpoint has no tensors.") : tensorTree({
    groups, group, filter: options.filter, signal, changed: (changed) => remember({ ...changed, key: null }),
    fetchRows: (query, end) => get(`${stepAddress(route.run, route.step)}/tree`, query, end),
    onTensor: (tensor, inGroup) => { remember({ key: tensor.key, group: inGroup }, true); panel.show(tensor.key, inGroup); },
  });
  const verify = isReport() ? null : verifyPanel(route.run, route.step, drawState, signal);
  const parent = stepBefore(rows, row);
  const compare = parent ? compareRoute({ run: route.run, step: parent.folder }, { run: route.run, step: route.step }) : compareRoute(null, { run: route.run, step: route.step });
  replace(main, head, overview(step, row, run),
    isReport() ? null : el("div", { class: "actions" }, el("a", { class: "button", href: compare }, parent ? `Compare with ${stepName(parent.folder)}` : "Compare with another"), el("a", { class: "button", href: layoutRoute(route.run, route.step, { group }) }, "Layout"), verify.node),
    section("Tensors", "Folded by layer; arrow keys unfold.", el("div", { class: "tensors" }, tree.node || tree, panel.node)),
    groups.length ? section("Groups", null, groupsTable(groups), (step.optimizer || []).map(optimizerOf)) : null,
    lineage(step, rows, route), section("State", "state.json: what is not a tensor.", step.state_problem ? failed(new Error(step.state_problem)) : step.state === null || step.state === undefined ? empty("There is none.") : jsonTree("state.json", step.state, true)),
    step.config ? section("Config", "config.json", jsonTree("config.json", step.config, false)) : null, extras(step), files(step));
  if (options.key) panel.show(options.key, group);
  if (tree.mark && options.key) tree.mark(options.key);
  setShortcuts({ c: () => { location.hash = compare; }, v: () => verify && verify.start() });
  offerTags(main, route, step, signal);
  return (other) => followed(other, options, panel, tree);
}

// Back and forward between tensors of one checkpoint keep the tree as it is.
function followed(other, options, panel, tree) {
  if ((other.options.group || options.group) !== options.group || (other.options.filter || null) !== (options.filter || null)) return false;
  Object.assign(options, { key: other.options.key || null });
  if (other.options.key) panel.show(other.options.key, other.options.group || options.group);
  else panel.node.hidden = true;
  if (tree.mark) tree.mark(other.options.key || null);
  return true;
}

function stateLine(row) {
  const [word, kind] = stateOf(row);
  return [badge(word, kind), (row.tags || []).map((tag) => badge(tag, "tag")), row.note ? el("span", { class: kind === "bad" ? "warn" : "" }, ` ${visible(row.note)}`) : null];
}

function overview(step, row, run) {
  const why = row && run ? leaving(run.retention).get(row.folder) : null;
  const stays = row && run ? staying(run.retention).get(row.folder) : null;
  const metrics = Object.entries(step.metrics || {}).map(([metric, number]) => `${visible(metric)} ${value(number)}`);
  return facts([
    ["Saved", step.created ? el("span", { title: at(step.created) }, ago(step.created, Date.now())) : null], ["Size", size(step.bytes)],
    ["Ranks", step.world ? whole(step.world) : null], ["Tensors", tensorCount(step.groups || [])],
    ["Metrics", metrics.length ? metrics.slice(0, 8).join(", ") : null], row && row.branch ? ["Branch", whole(row.branch)] : null,
    why || stays ? [why ? "Goes next" : "Kept by", ruleWords(why || stays)] : null,
    step.address ? ["Folder", el("span", { class: "address" }, visible(step.address))] : null,
  ]);
}

// A group's tensors are counted once its headers were read.
function tensorCount(groups) {
  return groups.length && groups.every((group) => typeof group.keys === "number") ? whole(groups.reduce((sum, group) => sum + group.keys, 0)) : null;
}

function groupsTable(groups) {
  return shortTable("Groups", [{ label: "Group" }, { label: "Kind" }, { label: "Tensors", class: "c-num" }, { label: "Size", class: "c-num" }, { label: "Files" }],
    groups.map((group) => [visible(group.name), visible(group.kind || ""), whole(group.keys), size(group.bytes), list((group.files || []).map(visible), 3)]), 12);
}

function optimizerOf(entry) {
  return el("div", { class: "optimizer" }, jsonTree(`options of ${entry.group}${entry.number === undefined ? "" : `, group ${entry.number}`}`, entry.options, false));
}

function lineage(step, rows, route) {
  const found = step.lineage || {};
  const place = (number) => {
    const row = rows.find((entry) => entry.step === number);
    return row ? el("a", { href: stepRoute(route.run, row.folder) }, `step ${whole(number)}`) : `step ${whole(number)}`;
  };
  const several = (numbers) => [numbers].flat().slice(0, 8).map((number, index) => [index ? ", " : "", typeof number === "number" ? place(number) : visible(JSON.stringify(number))]);
  const pairs = [
    ["Trained on from", found.parent === null || found.parent === undefined ? "the beginning" : several(found.parent)],
    found.abandons && [found.abandons].flat().length ? ["Gave up", several(found.abandons)] : null,
    found.skips && [found.skips].flat().length ? ["Skipped as damaged", several(found.skips)] : null,
  ];
  const next = rows.filter((entry) => entry.parent === step.step && entry.folder !== step.folder).slice(0, 6);
  if (next.length) pairs.push(["Followed by", next.map((entry, index) => [index ? ", " : "", el("a", { href: stepRoute(route.run, entry.folder) }, stepName(entry.folder))])]);
  return section("Lineage", null, facts(pairs));
}

const KNOWN = ["folder", "step", "created", "bytes", "world", "groups", "files", "lineage", "metrics", "state", "config", "optimizer", "tags", "state_of_step", "state_problem", "note", "layout_axes", "address"];

function extras(step) {
  const rest = Object.fromEntries(Object.entries(step).filter(([name, content]) => !KNOWN.includes(name) && content !== null));
  return Object.keys(rest).length ? section("Manifest", "holdfast.json: what else it records.", jsonTree("manifest", rest, false)) : null;
}

function files(step) {
  const found = step.files || [];
  if (!found.length) return null;
  return section("Files", count(found.length, "file"), shortTable("Files", [{ label: "File" }, { label: "Size", class: "c-num" }, { label: "Blocks", class: "c-num" }],
    found.map((file) => [visible(file.name), size(file.bytes), file.blocks === null || file.blocks === undefined ? "–" : whole(file.blocks)]), 12));
}

async function offerTags(main, route, step, signal) {
  if (!(await allowed(signal).catch(() => false)) || signal.aborted) return;
  const again = () => stepView(main, route, signal);
  main.querySelector(".actions")?.after(tagPanel(route.run, route.step, step.tags || [], again, signal));
}
