// Reads every byte of a checkpoint again and names what does not fit its digest.

import { stepAddress } from "./data.js";
import { el, replace } from "./dom.js";
import { runJob } from "./jobs.js";
import { announce, failed, progressBar, shortTable } from "./parts.js";
import { count, duration, list, size, stepName, visible, whole } from "./text.js";
import { noteVerdict, resultOf } from "./verdicts.js";

export function verifyPanel(run, step, onResult, viewSignal) {
  const node = el("div", { class: "verify" });
  let running = false;
  const offer = () => replace(node, el("button", { type: "button", class: "button", "aria-keyshortcuts": "v", onclick: start }, "Verify every byte"));

  async function start() {
    if (running) return;
    running = true;
    const job = new AbortController();
    viewSignal.addEventListener("abort", () => job.abort(), { once: true });
    const bar = progressBar("Verification");
    replace(node, bar.node, el("button", { type: "button", class: "quiet", onclick: () => job.abort() }, "cancel"));
    const progress = ({ done, total, text }) => bar.update(done, total, total ? `${size(done)} of ${size(total)}` : visible(text || ""));
    try {
      const result = await runJob(`${stepAddress(run, step)}/verify`, {}, progress, job.signal);
      noteVerdict(run, step, result);
      show(result);
      onResult();
      announce(result.ok ? "The checkpoint is intact" : "The checkpoint is damaged");
    } catch (error) {
      if (!viewSignal.aborted) job.signal.aborted ? offer() : replace(node, failed(error, start));
    } finally {
      running = false;
    }
  }

  const show = (result) => replace(node, verdict(result, step), el("button", { type: "button", class: "button", onclick: start }, "Verify again"));
  if (resultOf(run, step)) show(resultOf(run, step));
  else offer();
  return { node, start };
}

function verdict(result, step) {
  if (result.ok) {
    return el("p", { class: "verdict good" }, `${result.partial ? "What was read is intact" : "Intact"}: ${size(result.bytes)} read in ${duration(result.seconds)}${result.partial ? "; the time limit was reached before the end" : ", every digest fits"}.`, result.unchecked ? ` Not checked: ${visible(result.unchecked)}` : "");
  }
  const damaged = result.damaged || [];
  const rows = damaged.map((entry) => [visible(entry.file), keysText(entry), visible(entry.text)]);
  const left = result.damaged_count - damaged.length;
  return el("div", { class: "verdict bad", role: "alert" }, el("p", null, `${stepName(step)} is damaged: ${count(result.damaged_tensors, "tensor")} in ${count(result.damaged_files, "file")} cannot be trusted. The other tensors can still be read with holdfast.load(path, state, only=[...]).`),
    shortTable("Damaged", [{ label: "File" }, { label: "Tensors", class: "c-key" }, { label: "What is wrong" }], rows, 20),
    left > 0 ? el("p", { class: "note" }, `${whole(left)} more damaged places are not listed; holdfast verify prints all of them.`) : null);
}

export function keysText({ keys, keys_count: all }) {
  const shown = keys.slice(0, 12).map(visible);
  return all > shown.length ? `${shown.join(", ")}${shown.length ? " and " : ""}${whole(all - shown.length)} more` : list(shown, 12);
}
