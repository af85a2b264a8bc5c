// Addresses of views: #/run/ID/step/FOLDER?key=value. Everything that a person can look at has one that can be shared.

const PATTERNS = [
  ["runs", /^\/?$/, []],
  ["run", /^\/run\/([^/]+)$/, ["run"]],
  ["step", /^\/run\/([^/]+)\/step\/([^/]+)$/, ["run", "step"]],
  ["layout", /^\/run\/([^/]+)\/step\/([^/]+)\/layout$/, ["run", "step"]],
  ["compare", /^\/compare$/, []],
];

export function parseRoute(hash) {
  const [path, query] = cut(hash.replace(/^#/, ""), "?");
  const options = Object.fromEntries(new URLSearchParams(query));
  for (const [view, pattern, names] of PATTERNS) {
    const match = pattern.exec(path);
    if (!match) continue;
    const places = Object.fromEntries(names.map((name, index) => [name, decoded(match[index + 1])]));
    return { view, ...places, options };
  }
  return { view: "unknown", path, options };
}

export function runRoute(run, options) {
  return `#/run/${encodeURIComponent(run)}${queryText(options)}`;
}

export function stepRoute(run, step, options) {
  return `#/run/${encodeURIComponent(run)}/step/${encodeURIComponent(step)}${queryText(options)}`;
}

export function layoutRoute(run, step, options) {
  return `#/run/${encodeURIComponent(run)}/step/${encodeURIComponent(step)}/layout${queryText(options)}`;
}

// The two sides are `RUN/STEP`; neither an id nor a folder contains a slash.
export function compareRoute(a, b, options) {
  return `#/compare${queryText({ a: a && sideText(a), b: b && sideText(b), ...options })}`;
}

export function parseSide(text) {
  const [run, step] = cut(text || "", "/");
  return run && step ? { run: decoded(run), step: decoded(step) } : null;
}

export function sideText(side) {
  return `${encodeURIComponent(side.run)}/${encodeURIComponent(side.step)}`;
}

export function queryText(options) {
  const kept = Object.entries(options || {}).filter(([, text]) => text !== null && text !== undefined && text !== "");
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}

function cut(text, separator) {
  const place = text.indexOf(separator);
  return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
