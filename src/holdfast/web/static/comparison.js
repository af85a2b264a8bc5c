// What a comparison says, in the order of what changed most. Pure functions.

// Layers by the largest relative change of any tensor of theirs, then tensors outside the layers.
export function mostChanged(result, most) {
  const found = (result.layers || []).map((layer, row) => ({ name: `layer ${layer}`, change: strongest(result.cells[row]) }));
  for (const entry of result.rest || []) found.push({ name: entry.key, change: number(entry.relative ?? "Infinity") });
  return found.filter((entry) => entry.change > 0).sort((a, b) => b.change - a.change).slice(0, most);
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
