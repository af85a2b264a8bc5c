// Who holds which box of a tensor under a mesh, and who reads which bytes when a checkpoint is restored on it.

import { boxesPicture } from "./boxes.js";
import { get, runAddress, stepAddress } from "./data.js";
import { el, replace, svg } from "./dom.js";
import { meaning } from "./glossary.js";
import { crumbs, empty, facts, failed, loading, section, shortTable } from "./parts.js";
import { layoutRoute, runRoute, stepRoute } from "./routes.js";
import { count, list, size, stepName, visible, whole } from "./text.js";
import { shapeText } from "./tree.js";

export async function layoutView(main, route, signal) {
  const run = await get(runAddress(route.run), null, signal).catch(() => null);
  const alone = run && run.kind === "checkpoint";
  crumbs([["Runs", "#/"], alone ? null : [run ? visible(run.name) : "run", runRoute(route.run)], [stepName(route.step), stepRoute(route.run, route.step)], ["Layout", null]].filter(Boolean));
  const options = { ...route.options };
  if (!options.key) Object.assign(options, await firstTensor(route, options.group, signal));
  const axes = run && run.layout_axes;
  const mesh = options.mesh || (axes ? Object.entries(axes).map(([name, extent]) => `${name}:${extent}`).join(",") : "dp:2,tp:2");
  const result = el("div");
  replace(main, el("div", { class: "page-head" }, el("h1", null, "Layout"), el("p", { class: "lede" }, "Which rank holds which part, and who reads what in a restore.")), form(route, options, mesh), result);
  await draw(result, route, { ...options, mesh }, signal);
  return null;
}

// The largest tensor of the first levels says most; the first one found is enough to begin with.
async function firstTensor(route, group, signal) {
  let prefix = "";
  for (let depth = 0; depth < 12; depth += 1) {
    const { rows, group: found } = await get(`${stepAddress(route.run, route.step)}/tree`, { group: group || "", prefix, fold: 1, offset: 0, limit: 200 }, signal);
    group = group || found;
    const folder = rows.find((row) => !row.key);
    const tensor = rows.filter((row) => row.key).sort((a, b) => (b.shape || []).length - (a.shape || []).length || b.bytes - a.bytes)[0];
    if (tensor && (!folder || (tensor.shape || []).length > 1)) return { group, key: tensor.key };
    if (!folder) return { group };
    prefix = folder.prefix;
  }
  return { group };
}

function form(route, options, mesh) {
  const field = el("input", { class: "search", id: "mesh", value: mesh, spellcheck: "false", required: true, placeholder: "dp:2,tp:2" });
  const key = el("input", { class: "search wide", id: "key", value: options.key || "", spellcheck: "false" });
  const node = el("form", { class: "chooser" },
    el("div", { class: "side" }, el("label", { for: "mesh" }, "Mesh"), field), el("div", { class: "side grow" }, el("label", { for: "key" }, "Tensor"), key), el("button", { class: "button" }, "Show"));
  node.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = layoutRoute(route.run, route.step, { ...options, mesh: field.value.replace(/\s+/g, ""), key: key.value });
  });
  return node;
}

async function draw(node, route, { mesh, group, key }, signal) {
  if (!key) return void replace(node, empty("This checkpoint has no tensors."));
  replace(node, loading("the plan"));
  try {
    const address = stepAddress(route.run, route.step);
    const [layout, tensor] = await Promise.all([get(`${address}/layout`, { mesh, group, key }, signal), get(`${address}/tensor`, { group, key }, signal)]);
    replace(node, described(layout, tensor, key));
  } catch (error) {
    if (!signal.aborted) replace(node, failed(error, () => draw(node, route, { mesh, group, key }, signal)));
  }
}

function described(layout, tensor, key) {
  const boxes = layout.boxes || [];
  return [
    el("h2", { class: "key" }, visible(key)),
    facts([["Shape", shapeText(tensor.shape || [])], ["Type", visible(tensor.dtype)], ["Size", size(tensor.bytes)], ["Ranks", whole(layout.ranks)], ["Placements", visible(layout.placements || "–")]]),
    section("Boxes", `A box is ${meaning("box")} Colors tell ranks apart; a label names who holds it.`, boxes.length ? boxesPicture(tensor.shape || [], boxes) : empty("No rank holds a part of it."),
      el("details", null, el("summary", null, "as a table"), shortTable("Boxes", [{ label: "Ranks" }, { label: "Offsets" }, { label: "Sizes" }], boxes.map((box) => [list(box.ranks.map(String), 16), box.offsets.join(", ") || "0", box.sizes.join(" × ") || "1"]), 32))),
    section("Restore", "The bytes of the tensor that each rank reads.", restore(layout.restore || [], tensor), layout.restore_note ? el("p", { class: "note" }, visible(layout.restore_note)) : null),
    (layout.files || []).length ? section("Save", `Which rank writes which block: ${meaning("block")}`, shortTable("Writers", [{ label: "File" }, { label: "Block", class: "c-num" }, { label: "Rank", class: "c-num" }], layout.files.map((entry) => [visible(entry.file), whole(entry.block), whole(entry.rank)]), 16)) : null,
  ];
}

function restore(entries, tensor) {
  if (!entries.length) return empty("Nobody reads a byte of it.");
  const rows = entries.map((entry) => {
    const reads = entry.reads || [];
    return [`rank ${entry.rank}`, strip(reads, tensor), size(entry.bytes), reads.length ? `${count(reads.length, "range")}: ${list(reads.map((read) => `${whole(read.begin)}–${whole(read.end)}`), 2)}` : "nothing"];
  });
  return shortTable("Who reads what", [{ label: "Rank" }, { label: "Of the tensor's bytes", class: "c-strip" }, { label: "Bytes", class: "c-num" }, { label: "Ranges of the file", class: "c-note" }], rows, 32);
}

// The tensor's bytes from begin to end as a strip, with what is read filled in.
function strip(reads, tensor) {
  const span = tensor.end - tensor.begin || 1;
  const shapes = reads.slice(0, 512).map((read) => {
    const start = Math.max(read.begin, tensor.begin);
    const end = Math.min(read.end, tensor.end);
    return end > start ? svg("rect", { class: "bar publish", x: ((start - tensor.begin) / span) * 200, width: Math.max(0.6, ((end - start) / span) * 200), y: 1, height: 10 }) : null;
  });
  return svg("svg", { class: "strip", viewBox: "0 0 200 12", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { class: "strip-rest", x: 0, y: 1, width: 200, height: 10 }), shapes);
}
