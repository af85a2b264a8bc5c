// One run: what is known in words, the save in flight, the picture, the steps, what goes next, what happened.

import { changesPanel } from "./changes.js";
import { get, isReport, runAddress } from "./data.js";
import { el, replace } from "./dom.js";
import { flightsPanel } from "./flights.js";
import { wordsHere } from "./glossary.js";
import { setShortcuts } from "./help.js";
import { changedMost } from "./changed_most.js";
import { announce, badge, crumbs, empty, redraw, section, setLinkState, shortTable } from "./parts.js";
import { goneSteps, leaving, merged, newestIntact, rowsOf, setAside, staying } from "./run_model.js";
import { queryText, stepRoute } from "./routes.js";
import { runChart } from "./run_chart.js";
import { stepsTable } from "./steps_table.js";
import { follow } from "./stream.js";
import { drawSummary } from "./summary.js";
import { ago, at, count, ruleWords, stepName, visible, visibleLines, whole } from "./text.js";
import { withVerdicts } from "./verdicts.js";
import { verifyPanel } from "./verify_panel.js";

const POINTS = 2000;
const LOG_MOST = 500;
const AGES_MS = 5000; // after which "3 min ago" is written anew

export async function runView(main, route, signal) {
  const address = runAddress(route.run);
  const run = await get(address, null, signal);
  const now = { id: route.run, run, rows: withVerdicts(route.run, rowsOf(run)), flights: null, metrics: {}, names: [], marks: [], metric: route.options.metric || null, changes: null, gone: [], removed: run.gone || [], problem: run.problem, kept: { keeping: {}, log: {} }, events: run.events || [], ...kept(run) };
  crumbs([["Runs", "#/"], [visible(run.name), null]]);
  const view = parts(now, route, signal);
  replace(main, view.nodes);
  view.draw();
  await Promise.allSettled([readFlights(now, view, signal), readMetrics(now, view, signal)]);
  findChanges(now, view, signal);
  if (!isReport()) listen(address, now, view, signal);
  const ages = setInterval(() => { if (!document.hidden) view.ages(); }, AGES_MS);
  signal.addEventListener("abort", () => clearInterval(ages));
  setShortcuts({ c: view.compareChosen });
  return null;
}

function kept(run) {
  return { retention: run.retention, leaving: leaving(run.retention), staying: staying(run.retention) };
}

function parts(now, route, signal) {
  const summary = el("dl", { class: "ledger" });
  const flights = flightsPanel();
  const chart = runChart(() => pictureOf(now), (row) => { location.hash = stepRoute(now.id, row.folder); });
  const names = el("div", { class: "chips", role: "group", "aria-label": "Metric" });
  const options = { ...route.options };
  const remember = (changed) => { Object.assign(options, changed); history.replaceState(null, "", `#/run/${encodeURIComponent(now.id)}${queryText(options)}`); };
  const table = stepsTable(() => now, route.options, remember);
  const key = el("ul", { class: "legend", "aria-label": "Legend" });
  const next = el("div");
  const log = el("div");
  const flightSection = section("In flight", "The save that is being written, rank by rank.", flights.node);
  const chartSection = section("Timeline", "A blade for each step, as long as its size; the loss above it, time to publish and stall below.", names, chart.node, key, wordsHere(["publish", "stall", "branch", "set aside", "goes next"]));
  const stepsSection = section("Steps", "Space chooses two for a comparison.", table.node);
  const nodes = [head(now), summary, flightSection, chartSection, stepsSection, section("Keeping", "What the rules keep, what goes when the next step is committed at the usual distance, and what is gone.", next), section("Log", null, log), settings(now.run)];

  // The newest step can be verified from here; the offer outlives redrawing until there is a newer step.
  let offered = null;
  now.verifyNode = isReport() ? null : (row) => {
    if (!offered || offered.folder !== row.folder) {
      const judged = () => { now.rows = withVerdicts(now.id, now.rows); draw(); };
      offered = { folder: row.folder, node: verifyPanel(now.id, row.folder, judged, signal).node };
    }
    return offered.node;
  };

  function draw() {
    now.gone = goneSteps(now);
    drawSummary(summary, now);
    chart.update();
    drawLegend(key, now);
    table.update();
    drawKeeping(next, now, signal);
    drawLog(log, now);
    drawNames();
    const none = !now.rows.length && !now.names.length;
    chartSection.hidden = none;
    stepsSection.hidden = !now.rows.length;
    flightSection.hidden = !(now.flights || []).length;
    flights.update(now.flights || []);
  }

  function drawNames() {
    replace(names, now.names.length < 2 ? null : now.names.slice(0, 40).map((name) => el("button", { type: "button", class: "chip", "aria-pressed": String(name === now.metric), onclick: () => choose(name) }, visible(name))));
  }

  async function choose(name) {
    now.metric = name;
    remember({ metric: name });
    await readMetrics(now, { draw }, signal);
    names.querySelector("[aria-pressed=true]")?.focus();
  }

  const ages = () => { drawSummary(summary, now); table.refresh(); };
  return { nodes, draw, ages, summary: () => drawSummary(summary, now), flights: () => { flightSection.hidden = !now.flights.length; flights.update(now.flights); drawSummary(summary, now); chart.update(); }, chart: chart.update, log: () => drawLog(log, now), compareChosen: table.compareChosen };
}

function head(now) {
  return el("div", { class: "page-head" }, el("h1", null, visible(now.run.name)), el("p", { class: "address" }, visible(now.run.address)));
}

function drawLegend(node, now) {
  const there = {
    committed: true, damaged: now.rows.some((row) => row.state === "damaged"), abandoned: setAside(now.rows).length > 0, gone: now.gone.length > 0, going: now.leaving.size > 0,
    tagged: now.rows.some((row) => (row.tags || []).length), saving: (now.flights || []).length > 0, kill: now.marks.some((mark) => mark.kind === "kill"), restore: now.marks.some((mark) => mark.kind === "restore"),
  };
  const words = { abandoned: "set aside", going: "goes next" };
  replace(node, Object.keys(there).filter((kind) => there[kind]).map((kind) => el("li", null, el("i", { class: `legend-key ${kind}`, "aria-hidden": "true" }), words[kind] || kind)));
}

function pictureOf(now) {
  const series = now.metric ? now.metrics[now.metric] : null;
  const rows = now.rows.filter((row) => typeof row.step === "number");
  return { rows, gone: now.gone, series: series && series.step.length ? series : null, metric: now.metric, marks: now.marks, leaving: now.leaving, flight: (now.flights || [])[0] };
}

function drawKeeping(node, now, signal) {
  const rows = (now.retention && now.retention.rows) || [];
  const policy = now.retention && now.retention.policy;
  const going = rows.filter((row) => !row.keep);
  const gone = now.gone.map((step) => [`step ${whole(step.step)}`, badge("gone", "gone"), ruleWords(step.why)]);
  const order = [...now.leaving].map(([folder, why]) => ({ folder, why, keep: false })).concat(rows.filter((row) => row.keep && !now.leaving.has(row.folder)));
  redraw(node, el("p", null, policy ? ["Rules: ", ruleWords(policy), " ", el("code", { class: "note" }, visible(policy))] : "The run names no rules; every step is kept."),
    order.length || gone.length ? shortTable("What goes, what stays, what is gone", [{ label: "Step" }, { label: "" }, { label: "Why" }],
      order.map((row) => [el("a", { href: stepRoute(now.id, row.folder) }, stepName(row.folder)), row.keep ? badge("stays", "good") : badge("goes next", "going"), ruleWords(row.why)]).concat(gone), Math.max(8, Math.min(now.leaving.size + 5, 20)), now.kept.keeping) : null,
    changesPanel(now, going, signal));
}

function drawLog(node, now) {
  if (!now.events.length) return void replace(node, empty("Nothing has happened since the page was opened."));
  const rows = [...now.events].reverse();
  redraw(node, shortTable("Log, newest first", [{ label: "When", class: "c-when" }, { label: "Step", class: "c-num" }, { label: "What" }],
    rows.map((event) => [el("span", { title: at(event.at) }, event.at ? ago(event.at, Date.now()) : "–"), event.step === null || event.step === undefined ? "–" : whole(event.step), [badge(event.kind, event.kind), " ", visible(event.text || "")]]), 8, now.kept.log));
}

function settings(run) {
  if (!run.config) return null;
  return section("Settings", "config.toml of the run.", el("details", null, el("summary", null, "Show"), el("pre", { class: "code", tabindex: 0 }, visibleLines(run.config))));
}

async function readFlights(now, view, signal) {
  now.flights = (await get(`${runAddress(now.id)}/flights`, null, signal)).flights || [];
  view.draw();
}

async function readMetrics(now, view, signal) {
  const found = await get(`${runAddress(now.id)}/metrics`, { names: now.metric || "", points: POINTS }, signal);
  now.names = found.all_names || Object.keys(found.names || {});
  now.metric = now.metric || (now.names.includes("loss") ? "loss" : now.names[0]) || null;
  now.marks = found.marks || [];
  Object.assign(now.metrics, found.names);
  if (now.metric && !now.metrics[now.metric]) Object.assign(now.metrics, (await get(`${runAddress(now.id)}/metrics`, { names: now.metric, points: POINTS }, signal)).names);
  view.draw();
}

// Which layers changed most is found again when there is another newest step, for one at a time.
async function findChanges(now, view, signal) {
  const newest = newestIntact(now.rows);
  if (!newest || now.compared === newest.folder || now.comparing) return;
  Object.assign(now, { compared: newest.folder, comparing: true });
  const changes = await changedMost(now, signal);
  Object.assign(now, { changes, comparing: false });
  if (signal.aborted) return;
  view.summary();
  findChanges(now, view, signal);
}

function listen(address, now, view, signal) {
  const handlers = {
    state: setLinkState,
    run: (delta) => { now.rows = withVerdicts(now.id, merged(now.rows, delta)); if (delta.retention) Object.assign(now, kept(delta)); now.removed = [...now.removed, ...(delta.gone || [])]; view.draw(); tell(delta); findChanges(now, view, signal); },
    flights: ({ flights }) => { now.flights = flights || []; view.flights(); },
    metrics: ({ names, marks }) => { append(now.metrics, names || {}, now); if (marks) now.marks = marks; view.chart(); },
    log: (event) => {
      now.events = [...now.events, event].slice(-LOG_MOST);
      if (event.kind === "kill" || event.kind === "restore") now.marks = [...now.marks, event];
      view.log();
      view.summary();
      view.chart();
    },
    problem: ({ problem }) => { now.problem = problem; view.summary(); },
    reload: () => reload(address, now, view, signal),
  };
  signal.addEventListener("abort", follow(`${address}/stream`, handlers));
}

async function reload(address, now, view, signal) {
  try {
    now.run = await get(address, null, signal);
    now.rows = withVerdicts(now.id, rowsOf(now.run));
    Object.assign(now, kept(now.run), { events: now.run.events || now.events, removed: now.run.gone || now.removed, problem: now.run.problem });
    await Promise.all([readFlights(now, view, signal), readMetrics(now, view, signal)]);
  } catch (error) {
    if (!signal.aborted) announce(visible(error.message));
  }
}

function append(metrics, fresh, now) {
  for (const [name, series] of Object.entries(fresh)) {
    const own = metrics[name];
    if (!now.names.includes(name)) now.names.push(name);
    if (!own) metrics[name] = { step: [...series.step], value: [...series.value] };
    else { own.step.push(...series.step); own.value.push(...series.value); }
    now.metric = now.metric || name;
  }
}

function tell(delta) {
  const rows = (delta.changed && delta.changed.steps) || [];
  const fresh = rows.filter((row) => row.state === "committed");
  const bad = rows.filter((row) => row.state === "damaged");
  if (bad.length) announce(`${count(bad.length, "step is", "steps are")} damaged: ${bad.slice(0, 3).map((row) => stepName(row.folder)).join(", ")}`);
  else if (fresh.length) announce(`${stepName(fresh[fresh.length - 1].folder)} is committed`);
}

