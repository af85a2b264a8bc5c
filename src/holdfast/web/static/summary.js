// What a person asks first about a run, answered in words: newest intact step, save in flight, stall, what goes and why.

import { el } from "./dom.js";
import { redraw } from "./parts.js";
import { damaged, leaving, newestIntact, publishTimes, setAside, stalls, stepBefore, usualGap } from "./run_model.js";
import { compareRoute, stepRoute } from "./routes.js";
import { ago, at, count, duration, list, milliseconds, ruleWords, size, stepName, visible, whole } from "./text.js";

// `now` has {id, problem, rows, flights, retention, gone, changes, verifyNode}; `changes` is a node or null, verifyNode(row) offers a verification.
export function drawSummary(node, now) {
  const lines = [problemLine(now), newestLine(now), flightLine(now), stallLine(now), goesLine(now), wentLine(now), damagedLine(now), silenceLine(now), changedLine(now)].filter(Boolean);
  redraw(node, lines.map(([name, content, kind]) => el("div", { class: `fact-line ${kind || ""}` }, el("dt", null, name), el("dd", null, content))));
}

// What keeps the server from looking: a root that is gone, a storage that refuses or does not answer.
function problemLine({ problem }) {
  return problem ? ["Problem", el("span", { class: "warn" }, visible(problem)), "bad"] : null;
}

function newestLine({ id, rows, verifyNode }) {
  const row = newestIntact(rows);
  if (!row) return ["Newest", rows.length ? "no step of this run is intact" : "no step was saved yet", rows.length ? "bad" : ""];
  return [row.verified ? "Newest, intact" : "Newest committed", [el("a", { class: "big", href: stepRoute(id, row.folder) }, stepName(row.folder)),
    el("span", null, el("span", { title: at(row.created) }, ` committed ${ago(row.created, Date.now())}`), `, ${size(row.bytes)}; ${row.verified ? `every byte verified ${row.verified_at ? ago(row.verified_at, Date.now()) : "just now"}` : "not verified: its manifest is good, its bytes were not read again"}`), verifyNode ? verifyNode(row) : null]];
}

function flightLine({ flights }) {
  if (!flights) return null;
  if (!flights.length) return ["In flight", "nothing is being saved now"];
  return ["In flight", flights.map((flight) => {
    const problems = (flight.ranks || []).filter((rank) => rank.problem);
    const share = flight.total > 0 ? `${Math.floor((100 * flight.written) / flight.total)}%` : visible(flight.phase);
    return el("span", { class: problems.length ? "warn" : "" }, `step ${whole(flight.step)}: ${share}`, problems.length ? `, trouble on ${rankList(problems)}` : "", " ");
  }), "live"];
}

function rankList(ranks) {
  return `${ranks.length === 1 ? "rank" : "ranks"} ${list(ranks.map((rank) => String(rank.rank)), 6)}`;
}

function stallLine({ rows }) {
  const stall = stalls(rows);
  const publish = publishTimes(rows);
  const published = publish === null ? "" : `; a step is published in ${duration(publish)} in the median`;
  if (!stall) return publish === null ? null : ["Stall", `not recorded${published}`];
  return ["Stall", `${milliseconds(stall.median)} in the median of ${count(stall.count, "save")} whose steps are here, ${milliseconds(stall.longest)} at most${published}`];
}

function goesLine({ id, retention }) {
  const going = [...leaving(retention)];
  if (!retention || !(retention.policy || going.length)) return ["Goes next", "nothing: the run keeps every step"];
  if (!going.length) return ["Goes next", "nothing; the rules keep every step that is here"];
  const [folder, why] = going[0];
  return ["Goes next", [el("a", { href: stepRoute(id, folder) }, stepName(folder)), `: ${ruleWords(why)}`, going.length > 1 ? `; ${whole(going.length - 1)} more` : ""]];
}

function wentLine({ gone }) {
  const last = (gone || [])[0];
  return last ? ["Removed last", `step ${whole(last.step)}: ${ruleWords(last.why)}${last.at ? `, ${ago(last.at, Date.now())}` : ""}`] : null;
}

function damagedLine({ id, rows }) {
  const bad = damaged(rows);
  const aside = setAside(rows);
  const parts = [];
  if (bad.length) parts.push(el("span", { class: "warn" }, `${count(bad.length, "step is", "steps are")} damaged: `, bad.slice(0, 3).map((row, index) => [index ? ", " : "", el("a", { href: stepRoute(id, row.folder) }, stepName(row.folder))]), bad.length > 3 ? ` and ${bad.length - 3} more` : ""));
  if (aside.length) parts.push(el("span", null, parts.length ? "; " : "", `${count(aside.length, "step")} set aside`));
  return parts.length ? ["Attention", parts, bad.length ? "bad" : ""] : null;
}

// A run that stopped looks like one that waits: how long ago its last sign was, against what is usual.
function silenceLine({ rows, flights }) {
  const newest = newestIntact(rows);
  const usual = usualGap(rows);
  if (!newest || !usual || (flights && flights.length)) return null;
  const silent = (Date.now() - new Date(newest.created).getTime()) / 1000;
  if (!(silent > Math.max(10, 5 * usual))) return null;
  return ["Silent", `no step was committed for ${duration(silent)}; they came every ${duration(usual)}. The run may have ended or stopped.`];
}

function changedLine({ id, rows, changes }) {
  const newest = newestIntact(rows);
  const before = stepBefore(rows, newest);
  if (!before) return null;
  const link = el("a", { href: compareRoute({ run: id, step: before.folder }, { run: id, step: newest.folder }) }, `since ${stepName(before.folder)}`);
  return ["Changed most", changes ? [changes, ", ", link] : ["see what changed ", link]];
}
