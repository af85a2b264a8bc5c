// Scales and ticks of charts. Pure functions.

const BREAK = 44; // pixels of a stretch that is drawn short
const MOST_OF_BREAKS = 0.4; // of the width

export function linear(domain, range) {
  const [low, high] = domain;
  const span = high - low || 1;
  return (x) => range[0] + ((x - low) / span) * (range[1] - range[0]);
}

// A linear scale on which long stretches without steps are drawn short, if they would squeeze the steps together.
// Returns {place, breaks: [{from, to, at}], pieces: [[from, to]]}; without such stretches there are no breaks.
export function broken(domain, range, steps, slot) {
  const sorted = [...new Set([domain[0], ...steps, domain[1]])].sort((a, b) => a - b);
  const gaps = sorted.slice(1).map((step, index) => ({ from: sorted[index], to: step, size: step - sorted[index] }));
  const usual = median(gaps.map((gap) => gap.size)) || 0;
  const [whole, wide] = [domain[1] - domain[0], range[1] - range[0]];
  const most = Math.floor((wide * MOST_OF_BREAKS) / BREAK);
  const long = gaps.length > 3 && (usual / whole) * wide < slot ? gaps.filter((gap) => gap.size > 12 * usual && (gap.size / whole) * wide > 2 * BREAK) : [];
  const breaks = long.sort((a, b) => b.size - a.size).slice(0, most).sort((a, b) => a.from - b.from);
  if (!breaks.length) return { place: linear(domain, range), breaks: [], pieces: [domain] };
  const scale = (wide - breaks.length * BREAK) / (whole - breaks.reduce((sum, gap) => sum + gap.size, 0));
  const place = (x) => {
    let at = range[0] + (Math.min(x, breaks[0].from) - domain[0]) * scale;
    breaks.forEach((gap, index) => {
      const end = index + 1 < breaks.length ? breaks[index + 1].from : Math.max(x, gap.to);
      if (x > gap.from) at += (BREAK * (Math.min(x, gap.to) - gap.from)) / gap.size;
      if (x > gap.to) at += (Math.min(x, end) - gap.to) * scale;
    });
    return at;
  };
  const ends = [domain[0], ...breaks.flatMap((gap) => [gap.from, gap.to]), domain[1]];
  const pieces = breaks.map((gap, index) => [ends[2 * index], ends[2 * index + 1]]).concat([[ends[ends.length - 2], domain[1]]]);
  return { place, breaks: breaks.map((gap) => ({ from: gap.from, to: gap.to, at: place((gap.from + gap.to) / 2) })), pieces };
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
