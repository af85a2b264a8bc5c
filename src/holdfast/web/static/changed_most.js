// Which layers changed most since the step before: computed by itself for small steps, behind a link for large ones.

import { get, isReport } from "./data.js";
import { el } from "./dom.js";
import { runJob } from "./jobs.js";
import { changedText } from "./comparison.js";
import { newestIntact, stepBefore } from "./run_model.js";

const BYTES_MOST = 256e6;

export async function changedMost(now, signal) {
  const result = await comparison(now, signal).catch(() => null);
  if (!result) return null;
  return el("span", { class: result.unread ? "warn" : "" }, changedText(result));
}

async function comparison(now, signal) {
  if (isReport()) return (await get("/api/compare")).result;
  const newest = newestIntact(now.rows);
  const before = stepBefore(now.rows, newest);
  if (!before || newest.bytes > BYTES_MOST) return null;
  const body = { a: { run: now.id, step: before.folder }, b: { run: now.id, step: newest.folder }, mapping: null, what: "heatmap" };
  return runJob("/api/compare", body, () => undefined, signal);
}
