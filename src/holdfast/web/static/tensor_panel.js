// One tensor: where its bytes are, who wrote them, and its statistics when they are asked for.

import { get, isReport, stepAddress } from "./data.js";
import { el, replace } from "./dom.js";
import { meaning } from "./glossary.js";
import { histogram } from "./histogram.js";
import { runJob } from "./jobs.js";
import { facts, failed, loading, progressBar, shortTable } from "./parts.js";
import { layoutRoute } from "./routes.js";
import { size, value, visible, whole } from "./text.js";
import { shapeText } from "./tree.js";

export function tensorPanel(run, step, viewSignal) {
  const node = el("aside", { class: "tensor-panel", "aria-label": "The chosen tensor", hidden: true });
  let ending = new AbortController();
  viewSignal.addEventListener("abort", () => ending.abort());

  async function show(key, group) {
    ending.abort();
    ending = new AbortController();
    const signal = ending.signal;
    node.hidden = false;
    const title = el("h3", { class: "key", tabindex: -1 }, visible(key));
    const body = el("div", null, loading("the tensor"));
    replace(node, title, body);
    try {
      const tensor = await get(`${stepAddress(run, step)}/tensor`, { group, key }, signal);
      replace(body, described(tensor, run, step, group, key), statistics(run, step, group, key, signal), blocksOf(tensor));
    } catch (error) {
      if (!signal.aborted) replace(body, failed(error, () => show(key, group)));
    }
  }

  return { node, show };
}

function described(tensor, run, step, group, key) {
  return [facts([
    ["Shape", shapeText(tensor.shape || [])], ["Type", visible(tensor.dtype)], ["Size", size(tensor.bytes)], ["File", visible(tensor.file)],
    ["Bytes", `${whole(tensor.begin)} to ${whole(tensor.end)}`],
    tensor.scale ? ["Scale", visible(JSON.stringify(tensor.scale))] : null,
  ]), isReport() ? null : el("p", null, el("a", { href: layoutRoute(run, step, { group, key }) }, "Which rank holds what"))];
}

function statistics(run, step, group, key, viewSignal) {
  const node = el("div", { class: "statistics" });
  if (isReport()) return node;
  const ask = () => replace(node, el("button", { type: "button", class: "button", onclick: start }, "Compute statistics"));
  async function start() {
    const job = new AbortController();
    viewSignal.addEventListener("abort", () => job.abort(), { once: true });
    const bar = progressBar("Statistics");
    replace(node, bar.node, el("button", { type: "button", class: "quiet", onclick: () => job.abort() }, "cancel"));
    try {
      const result = await runJob(`${stepAddress(run, step)}/statistics`, { group, keys: [key] }, (state) => bar.update(state.done, state.total, visible(state.text || "")), job.signal);
      replace(node, drawn(result));
    } catch (error) {
      if (viewSignal.aborted) return;
      if (job.signal.aborted) ask();
      else replace(node, failed(error, start));
    }
  }
  ask();
  return node;
}

function drawn(result) {
  const found = (result.tensors || [])[0];
  if (!found) return el("p", { class: "empty" }, "There was no time to read the tensor; try again, or use holdfast show.");
  const odd = found.nan || found.inf;
  return [result.partial ? el("p", { class: "warn" }, "The time limit was reached: these are of a part of the tensor.") : null,
    histogram(found.histogram || { edges: [], counts: [] }),
    facts([["Minimum", value(found.min)], ["Maximum", value(found.max)], ["Mean", value(found.mean)], ["Deviation", value(found.std)], ["Norm", value(found.norm)], ["Zeros", whole(found.zeros)],
      ["NaN", el("span", { class: found.nan ? "warn" : "" }, whole(found.nan))], ["Infinite", el("span", { class: found.inf ? "warn" : "" }, whole(found.inf))]]),
    odd ? el("p", { class: "warn" }, "This tensor has values that are not finite.") : null];
}

function blocksOf(tensor) {
  const blocks = tensor.blocks || [];
  if (!blocks.length) return null;
  return el("details", null, el("summary", null, `Blocks (${whole(blocks.length)})`), el("p", { class: "note" }, `A block is ${meaning("block")}`),
    shortTable("Blocks", [{ label: "Bytes of the file" }, { label: "Size", class: "c-num" }, { label: "Written by" }, { label: "Digest" }],
      blocks.map((block) => [`${whole(block.begin)} to ${whole(block.end)}`, size(block.end - block.begin), block.writer === null || block.writer === undefined ? "–" : `rank ${visible(block.writer)}`, el("code", { class: "digest", title: visible(block.digest) }, visible(block.digest).slice(0, 16))]), 20));
}
