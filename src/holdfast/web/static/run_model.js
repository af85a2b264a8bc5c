// The steps of a run as rows, what changed in them, and the facts that the summary states. Pure functions.

import { median } from "./scales.js";

const COLUMNS = ["folder", "step", "state", "created", "bytes", "seconds", "stall_ms", "parent", "branch", "tags", "world", "note", "verified", "verified_at"];
export const GONE_UNSEEN = "removed by someone outside of Holdfast, or before events were kept";
const RANK = { damaged: 3, committed: 2 };

export function rowsOf(run) {
  const columns = run.steps || run;
  const length = (columns.folder || []).length;
  const metrics = run.metrics || {};
  const rows = [];
  for (let index = 0; index < length; index += 1) {
    const row = {};
    for (const name of COLUMNS) row[name] = columns[name] ? columns[name][index] : null;
    row.metrics = {};
    for (const name of Object.keys(metrics)) row.metrics[name] = metrics[name][index];
    rows.push(row);
  }
  return rows.sort(newestFirst);
}

// Applies an event of the stream: rows that are new or changed, and folders that are gone.
export function merged(rows, delta) {
  const changed = new Map(((delta.changed && delta.changed.steps) || []).map((row) => [row.folder, row]));
  const removed = new Set(delta.removed || []);
  const kept = rows.filter((row) => !removed.has(row.folder)).map((row) => {
    const other = changed.get(row.folder);
    changed.delete(row.folder);
    return other ? { ...row, ...other, metrics: { ...row.metrics, ...other.metrics } } : row;
  });
  for (const row of changed.values()) if (!removed.has(row.folder)) kept.push({ tags: [], metrics: {}, ...row });
  return kept.sort(newestFirst);
}

export function newestIntact(rows) {
  return rows.find((row) => row.state === "committed") || null;
}

// Folders that go, with the reason: those that `holdfast gc` would delete now, then those that the next save deletes.
export function leaving(retention) {
  const rows = (retention && retention.rows) || [];
  const policy = (retention && retention.policy) || "none";
  const found = new Map(rows.filter((row) => !row.keep).map((row) => [row.folder, row.why.replace("the policy", `the rules (${policy})`)]));
  const reasons = staying(retention);
  for (const folder of (retention && retention.next) || []) {
    if (!found.has(folder)) found.set(folder, `no longer among ${reasons.get(folder) || "those that a rule keeps"} once ${nextStep(retention)} is committed`);
  }
  return found;
}

// The step that the preview of retention is made for.
function nextStep({ next_step: step }) {
  return typeof step === "number" ? `step ${step.toLocaleString("en-US")}, if that is the next,` : "the next step";
}

export function staying(retention) {
  const rows = (retention && retention.rows) || [];
  return new Map(rows.filter((row) => row.keep).map((row) => [row.folder, row.why]));
}

// Steps that were there once: published by the log, or trained on from, and not among the rows. The newest first.
export function goneSteps({ rows, events, retention, removed }) {
  const here = new Set(rows.map((row) => row.step));
  const found = new Map();
  const policy = retention && retention.policy;
  const note = (step, at) => { if (typeof step === "number" && !here.has(step) && !found.has(step)) found.set(step, { step, why: whyGone(policy, step), at }); };
  for (const one of removed || []) if (typeof one.step === "number" && !here.has(one.step)) found.set(one.step, { step: one.step, why: one.why || whyGone(policy, one.step), at: one.at });
  for (const row of rows) note(row.parent, null);
  for (const event of events || []) {
    if (event.kind === "published") note(event.step, null);
    if (event.kind === "removed" && !here.has(event.step)) found.set(event.step, { step: event.step, why: event.text || whyGone(policy, event.step), at: event.at });
  }
  return [...found.values()].sort((a, b) => b.step - a.step);
}

// What is known of a step that nobody saw go, as the server says it: rules of numbers tell, others cannot be asked any more.
function whyGone(policy, step) {
  if (!policy) return GONE_UNSEEN;
  const keeping = [...policy.matchAll(/every\((\d+)\)/g)].find((match) => step % Number(match[1]) === 0);
  if (keeping) return `removed by someone outside of Holdfast, or by other rules before: ${keeping[0]} keeps it`;
  return `deleted, as far as can be told: ${policy} did not keep it`;
}

// What is known of a folder that is not there.
export function goneText(folder, rows, run) {
  const match = /^step-0*(\d+)$/.exec(folder);
  const step = match ? Number(match[1]) : null;
  const gone = match && goneSteps({ rows, events: run.events, retention: run.retention, removed: run.gone }).find((one) => one.step === step);
  if (gone) return `Step ${step.toLocaleString("en-US")} is gone: ${gone.why}.`;
  return `${match ? `Step ${step.toLocaleString("en-US")}` : folder} is not in this run: ${GONE_UNSEEN}, or never saved.`;
}

export function stalls(rows) {
  const measured = rows.map((row) => row.stall_ms).filter((value) => typeof value === "number");
  return measured.length ? { median: median(measured), longest: measured.reduce((a, b) => Math.max(a, b), 0), count: measured.length } : null;
}

export function publishTimes(rows) {
  return median(rows.map((row) => row.seconds));
}

export function damaged(rows) {
  return rows.filter((row) => row.state === "damaged");
}

export function setAside(rows) {
  return rows.filter((row) => row.state !== "damaged" && row.state !== "committed");
}

// The usual seconds between commits, of the last three gaps: of older steps every n-th may be left. Null if there are too few to say.
export function usualGap(rows) {
  const times = rows.filter((row) => row.state === "committed").slice(0, 20).map((row) => new Date(row.created).getTime() / 1000).filter(Number.isFinite);
  const gaps = times.slice(1).map((time, index) => times[index] - time).filter((gap) => gap > 0).slice(0, 3); // a clock may be set back
  return gaps.length < 3 ? null : median(gaps);
}

// The folder of the step that a row was trained on from, if it is still there.
export function parentRow(rows, row) {
  if (row.parent === null || row.parent === undefined) return null;
  const same = rows.filter((other) => other.step === row.parent);
  return same.find((other) => other.state === "committed") || same[0] || null;
}

// The intact step to compare the newest with: the one it was trained on from, else the one before it.
export function stepBefore(rows, newest) {
  const parent = newest && parentRow(rows, newest);
  if (parent && parent.state === "committed") return parent;
  return (newest && rows.find((row) => row.state === "committed" && row.step < newest.step)) || null;
}

export function matches(row, filter, text) {
  if (filter === "committed" && row.state !== "committed") return false;
  if (filter === "verified" && !row.verified) return false;
  if (filter === "damaged" && row.state !== "damaged") return false;
  if (filter === "set aside" && (row.state === "committed" || row.state === "damaged")) return false;
  if (filter === "tagged" && !(row.tags || []).length) return false;
  if (!text) return true;
  const needle = text.toLowerCase().replace(/,/g, "");
  return [row.folder, row.step, ...(row.tags || [])].some((part) => String(part).toLowerCase().includes(needle));
}

function newestFirst(a, b) {
  return (b.step ?? -1) - (a.step ?? -1) || (RANK[b.state] || 0) - (RANK[a.state] || 0) || (a.folder < b.folder ? 1 : -1);
}
