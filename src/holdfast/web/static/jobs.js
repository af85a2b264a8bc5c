// Bounded work on the server: started, followed until it ends, cancelled when the view goes away.

import { get, send, ServerError } from "./data.js";

const FIRST_MS = 80;
const LONGEST_MS = 1000;

// Returns the result; `onProgress` gets {done, total, text} meanwhile. Aborting `signal` cancels the work on the server, too.
export async function runJob(path, body, onProgress, signal) {
  const { job } = await send("POST", path, body, signal);
  const address = `/api/jobs/${encodeURIComponent(job)}`;
  const cancel = () => send("DELETE", address).catch(() => undefined);
  if (signal.aborted) cancel();
  signal.addEventListener("abort", cancel, { once: true });
  try {
    return await followed(address, onProgress, signal);
  } finally {
    signal.removeEventListener("abort", cancel);
  }
}

async function followed(address, onProgress, signal) {
  let wait = FIRST_MS;
  for (;;) {
    const state = await get(address, null, signal);
    if (state.state === "done") return state.result;
    if (state.state === "failed") throw failure(state.error);
    if (state.state === "cancelled") throw new ServerError("Cancelled", "The work was cancelled.", 0);
    onProgress(state);
    await pause(wait, signal);
    wait = Math.min(wait * 1.5, LONGEST_MS);
  }
}

function failure(error) {
  if (error && typeof error === "object") return new ServerError(error.kind || "Failed", error.message || "The work failed.", 0);
  return new ServerError("Failed", error || "The work failed.", 0);
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}
