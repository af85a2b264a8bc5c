// What verifications of this visit found: a step whose manifest is whole may still have a damaged byte in its files.

const found = new Map();

export function noteVerdict(run, step, result) {
  if (result.partial && result.ok) return;
  const files = [...new Set((result.damaged || []).map((entry) => entry.file))];
  found.set(`${run}/${step}`, { result, ok: result.ok, note: result.ok ? null : `found by a verification: ${files.slice(0, 3).join(", ")} damaged` });
}

export function resultOf(run, step) {
  const verdict = found.get(`${run}/${step}`);
  return verdict ? verdict.result : null;
}

export function withVerdicts(run, rows) {
  return found.size ? rows.map((row) => judged(row, found.get(`${run}/${row.folder}`))) : rows;
}

function judged(row, verdict) {
  if (!verdict) return row;
  return verdict.ok ? { ...row, verified: true } : { ...row, verified: false, state: "damaged", note: verdict.note };
}
