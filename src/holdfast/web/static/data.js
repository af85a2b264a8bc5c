// The one place that asks the server. In a report (`holdfast report`) the answers are in the page itself.

import { queryText } from "./routes.js";

const EMBEDDED = readEmbedded();
const WAIT_MS = 60000;

export class ServerError extends Error {
  constructor(kind, message, status) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

export function isReport() {
  return EMBEDDED !== null;
}

export function stepAddress(run, step) {
  return `${runAddress(run)}/steps/${encodeURIComponent(step)}`;
}

export function runAddress(run) {
  return `/api/runs/${encodeURIComponent(run)}`;
}

export async function get(path, options, signal) {
  const address = path + queryText(options);
  if (EMBEDDED) return embedded(address);
  return request(address, { method: "GET" }, signal);
}

// Starts bounded work, or changes something; the header cannot be sent by a form of another site.
export async function send(method, path, body, signal) {
  if (EMBEDDED) throw new ServerError("Report", "A report has no server; run `holdfast serve` for this.", 0);
  const headers = { "X-Holdfast": "1", "Content-Type": "application/json" };
  return request(path, { method, headers, body: JSON.stringify(body || {}) }, signal);
}

async function request(address, options, signal) {
  const limit = AbortSignal.timeout(WAIT_MS);
  const either = signal ? AbortSignal.any([signal, limit]) : limit;
  let response;
  try {
    response = await fetch(address, { ...options, signal: either, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    const slow = error.name === "TimeoutError";
    throw new ServerError("Unreachable", slow ? "The server did not answer within a minute." : "The server cannot be reached.", 0);
  }
  return answer(response);
}

async function answer(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    throw new ServerError("Unreadable", `The server answered ${response.status} with something that is not JSON.`, response.status);
  }
  if (!response.ok) {
    const error = (body && body.error) || {};
    throw new ServerError(error.kind || "Error", error.message || `The server answered ${response.status}.`, response.status);
  }
  return body;
}

function embedded(address) {
  const [path, query] = address.split("?");
  const exact = EMBEDDED[path + queryText(Object.fromEntries([...new URLSearchParams(query)].sort()))];
  const found = EMBEDDED[address] ?? exact ?? EMBEDDED[path];
  if (found === undefined) throw new ServerError("NotInReport", "This report does not contain that; run `holdfast serve` to see it.", 404);
  return found;
}

function readEmbedded() {
  const holder = document.getElementById("holdfast-data");
  return holder ? JSON.parse(holder.textContent) : null;
}
