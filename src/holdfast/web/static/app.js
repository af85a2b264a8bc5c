// Starts the page and shows the view that the address names.

import { get, isReport } from "./data.js";
import { byId, el, replace } from "./dom.js";
import { setShortcuts, startHelp } from "./help.js";
import { crumbs, failed, loading, setLinkState } from "./parts.js";
import { parseRoute } from "./routes.js";
import { visible } from "./text.js";
import { startTheme } from "./theme.js";
import { compareView } from "./view_compare.js";
import { layoutView } from "./view_layout.js";
import { runView } from "./view_run.js";
import { runsView } from "./view_runs.js";
import { stepView } from "./view_step.js";

const VIEWS = { runs: runsView, run: runView, step: stepView, layout: layoutView, compare: compareView };

let leaving = new AbortController();
let shown = null;

function start() {
  startTheme();
  startHelp();
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
  window.addEventListener("hashchange", navigate);
  setLinkState(isReport() ? "report" : "none");
  footer();
  navigate();
}

// A view gets where to draw, its route, and a signal that ends what it started when another view comes.
function navigate() {
  const route = parseRoute(location.hash);
  if (shown && shown.stays && shown.place === placeOf(route) && shown.stays(route)) return;
  leaving.abort();
  leaving = new AbortController();
  setShortcuts({});
  if (!isReport()) setLinkState("none");
  const main = byId("main");
  shown = { place: placeOf(route), stays: null };
  const view = VIEWS[route.view];
  if (!view) return void missing(main, route);
  replace(main, loading("the page"));
  window.scrollTo(0, 0);
  show(view, main, route, leaving.signal);
}

async function show(view, main, route, signal) {
  const place = shown;
  try {
    place.stays = (await view(main, route, signal)) || null;
  } catch (error) {
    if (signal.aborted) return;
    crumbs([["Runs", "#/"], ["Problem", null]]);
    replace(main, failed(error, navigate));
  }
}

function placeOf(route) {
  return [route.view, route.run, route.step].join("\n");
}

function missing(main, route) {
  crumbs([["Runs", "#/"], ["Not found", null]]);
  replace(main, failed(new Error(`There is no view at ${visible(route.path)}.`)), el("p", null, el("a", { href: "#/" }, "All runs")));
}

async function footer() {
  try {
    const about = await get("/api/about");
    const mode = isReport() ? "report" : about.changes_allowed ? "changes are allowed" : "looks only, changes nothing";
    replace(byId("foot"), el("span", null, `Holdfast ${visible(about.version)}`), el("span", null, mode), (about.roots || []).length ? el("span", { class: "address" }, `served: ${about.roots.map(visible).join(", ")}`) : null);
  } catch {
    replace(byId("foot"));
  }
}

start();
