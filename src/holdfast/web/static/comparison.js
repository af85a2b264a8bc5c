// What a comparison says, in the order of what changed most. Pure functions.

import { count, list, visible } from "./text.js";

// Layers by the norm of the change of all their tensors beside the norm before, and the tensors that are in no layer. One of
// those that was zero before has no finite change: it comes last.
export function mostChanged(result, most) {
  const found = (result.layers || []).map((layer, row) => ({ name: `layer ${layer}`, change: number(result.layer_changes[row]) }));
  for (const entry of result.rest || []) found.push({ name: entry.key, change: number(entry.relative ?? "Infinity"), isOutside: true });
  const rank = (entry) => (entry.isOutside && !Number.isFinite(entry.change) ? 0 : entry.change);
  return found.filter((entry) => entry.change > 0).sort((a, b) => rank(b) - rank(a)).slice(0, most);
}

// What changed most in one line; what could not be read is not called unchanged.
export function changedText(result) {
  const names = list(mostChanged(result, 3).map((entry) => visible(entry.name)), 3);
  const unread = result.unread ? `${count(result.unread, "tensor")} could not be read` : "";
  return [names, unread].filter(Boolean).join("; ") || "nothing changed";
}

export function strongest(cells) {
  return (cells || []).reduce((most, cell) => Math.max(most, number(cell)), 0);
}

// A change from zero has no finite relative size: it counts as the largest.
export function number(cell) {
  if (typeof cell === "number") return cell;
  return cell === "Infinity" || cell === "NaN" ? Infinity : 0;
}

// The share of the color scale, 0 to 1, on a logarithmic scale between the smallest and the largest change that is not 0.
export function shade(cell, range) {
  const amount = number(cell);
  if (amount <= 0 || !range) return 0;
  if (!Number.isFinite(amount)) return 1;
  const [low, high] = range.map(Math.log10);
  return high > low ? 0.12 + 0.88 * Math.max(0, Math.min(1, (Math.log10(amount) - low) / (high - low))) : 0.7;
}

export function changeRange(cells) {
  let low = Infinity;
  let high = 0;
  for (const row of cells) {
    for (const cell of row) {
      const amount = number(cell);
      if (amount <= 0 || !Number.isFinite(amount)) continue;
      low = Math.min(low, amount);
      high = Math.max(high, amount);
    }
  }
  return high > 0 ? [Math.max(low, high / 1e6), high] : null;
}

export function percent(cell) {
  if (cell === null || cell === undefined) return "not there";
  const amount = number(cell);
  if (cell === "NaN") return "NaN";
  if (!Number.isFinite(amount)) return "from zero";
  if (amount === 0) return "unchanged";
  const share = amount * 100;
  return `${share >= 0.0001 && share < 1e6 ? Number(share.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 8 }) : share.toExponential(1)}%`;
}
