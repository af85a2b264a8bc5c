// Scales and ticks of charts. Pure functions.

export function linear(domain, range) {
  const [low, high] = domain;
  const span = high - low || 1;
  return (x) => range[0] + ((x - low) / span) * (range[1] - range[0]);
}

export function logarithmic(domain, range) {
  const [low, high] = domain.map((x) => Math.log10(x));
  const place = linear([low, high], range);
  return (x) => place(Math.log10(Math.max(x, Number.MIN_VALUE)));
}

export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (typeof value !== "number" || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// About `wanted` round numbers inside the domain.
export function ticks([low, high], wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9 && found.length < 100; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : Number(tick.toPrecision(12)));
  }
  return found;
}

export function wholeTicks(domain, wanted) {
  return [...new Set(ticks(domain, wanted).filter(Number.isInteger))];
}

export function median(values) {
  const sorted = values.filter((value) => typeof value === "number" && Number.isFinite(value)).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
