// Numbers, sizes, times and names as people read them. Pure functions.

const INTEGER = new Intl.NumberFormat("en-US");
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
const DASH = "–";
const SHORT = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };

export function count(number, noun, plural) {
  return `${whole(number)} ${number === 1 ? noun : plural || `${noun}s`}`;
}

export function whole(number) {
  return Number.isFinite(number) ? INTEGER.format(number) : odd(number);
}

// Sizes in powers of 1,000, with three significant digits, as `holdfast ls` prints them.
export function size(bytes) {
  if (typeof bytes !== "number" || !Number.isFinite(bytes)) return odd(bytes);
  let amount = Math.abs(bytes);
  let unit = 0;
  while (amount >= 999.5 && unit < UNITS.length - 1) {
    amount /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || amount >= 99.95 ? 0 : amount >= 9.995 ? 1 : 2;
  return `${bytes < 0 ? "-" : ""}${amount.toFixed(digits)} ${UNITS[unit]}`;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return odd(seconds);
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${threeDigits(seconds * 1000)} ms`;
  if (seconds < 100) return `${threeDigits(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${threeDigits(seconds / 3600)} h`;
  return `${value(Math.round(seconds / 86400))} days`;
}

export function milliseconds(amount) {
  return typeof amount === "number" ? duration(amount / 1000) : odd(amount);
}

// A value of a tensor or a metric: short, never rounded to nothing.
export function value(number) {
  if (typeof number !== "number" || !Number.isFinite(number)) return odd(number);
  if (number === 0) return "0";
  const magnitude = Math.abs(number);
  if (Number.isInteger(number) && magnitude < 1e7) return whole(number);
  if (magnitude < 1e-4 || magnitude >= 1e7) return shortExponent(number);
  return String(Number(number.toPrecision(5)));
}

export function ago(instant, now) {
  const seconds = (now - moment(instant).getTime()) / 1000;
  if (!Number.isFinite(seconds)) return "at an unknown time";
  if (seconds < -5) return at(instant);
  if (seconds < 10) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function at(instant) {
  const time = moment(instant);
  if (Number.isNaN(time.getTime())) return DASH;
  const two = (number) => String(number).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
}

// A name that a checkpoint brought: control and direction characters are made visible, and cannot reorder the line.
export function visible(name) {
  return String(name).replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/g, escaped);
}

// A text of several lines, such as a file of settings.
export function visibleLines(text) {
  return String(text).split("\n").map((line) => visible(line.replace(/\t/g, "    "))).join("\n");
}

// Rules of retention as people say them: last(3) | every(100) is "the last 3, every 100th".
export function ruleWords(text) {
  return visible(text).replace(/last\((\d+)\)/g, "the last $1").replace(/every\(1\)/g, "every step").replace(/every\((\d+)\)/g, "every $1th")
    .replace(/best\((\d+), ?['"]?([^'")]*)['"]?[^)]*\)/g, "the best $1 by $2").replace(/newer_than\(['"]?([^'")]*)['"]?\)/g, "newer than $1").replace(/ \| /g, ", ");
}

export function list(names, most) {
  const shown = names.slice(0, most);
  const more = names.length - shown.length;
  if (more > 0) return `${shown.join(", ")} and ${whole(more)} more`;
  return shown.length > 1 ? `${shown.slice(0, -1).join(", ")} and ${shown[shown.length - 1]}` : shown.join("");
}

// The digits of a step's folder are enough for a title: step-000000004000 is 4,000.
export function stepName(folder) {
  const match = /^(?:([a-z-]+)-)?step-0*(\d+)(.*)$/.exec(folder);
  if (!match) return folder === "self" ? "checkpoint" : visible(folder);
  return `${match[1] ? `${match[1]} step` : "step"} ${match[2].length < 16 ? whole(Number(match[2])) : match[2]}${visible(match[3])}`;
}

function shortExponent(number) {
  return Number(number.toPrecision(4)).toExponential().replace("e+", "e");
}

// A time as text, or as seconds since 1970 as logs have it.
function moment(instant) {
  return new Date(typeof instant === "number" ? instant * 1000 : instant);
}

function threeDigits(amount) {
  return amount >= 99.95 ? amount.toFixed(0) : amount >= 9.995 ? amount.toFixed(1) : amount.toFixed(2);
}

function odd(number) {
  if (number === null || number === undefined) return DASH;
  return visible(number);
}

function escaped(character) {
  const code = character.codePointAt(0);
  if (SHORT[character]) return SHORT[character];
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
}
