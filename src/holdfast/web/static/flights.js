// Saves in flight: one bar for the save and one for each rank, so that a rank that hangs or died stands out.

import { el, replace } from "./dom.js";
import { count, duration, size, visible, whole } from "./text.js";
import { progressBar } from "./parts.js";

const MOST_RANKS = 64;
const SILENT_S = 5;

export function flightsPanel() {
  const node = el("div", { class: "flights" });
  const panels = new Map();

  function update(flights) {
    const names = new Set(flights.map(nameOf));
    for (const name of [...panels.keys()]) if (!names.has(name)) panels.delete(name);
    for (const flight of flights) {
      if (!panels.has(nameOf(flight))) panels.set(nameOf(flight), flightPanel(flight));
      panels.get(nameOf(flight)).update(flight);
    }
    const nodes = [...panels.values()].map((panel) => panel.node);
    if (nodes.length !== node.children.length || nodes.some((child, index) => node.children[index] !== child)) replace(node, nodes);
  }

  return { node, update };
}

function nameOf(flight) {
  return `${flight.attempt}/${flight.step}`;
}

function flightPanel(first) {
  const bar = progressBar(`Save of step ${first.step}`);
  const words = el("p", { class: "note" });
  const ranks = el("ol", { class: "ranks" });
  const more = el("p", { class: "note" });
  const drawn = new Map();
  const node = el("article", { class: "flight", "aria-label": `Save of step ${first.step}` },
    el("h3", null, `Step ${whole(first.step)}`), bar.node, words, ranks, more);

  function update(flight) {
    bar.update(flight.written, flight.total, flight.total ? `${size(flight.written)} of ${size(flight.total)}` : visible(flight.phase || ""));
    const all = flight.ranks || [];
    replace(words, `${visible(flight.phase || "")}${all.length ? ` on ${count(all.length, "rank")}` : ""}`, all.some((rank) => rank.problem) ? el("strong", { class: "warn" }, ` – ${visible(all.find((rank) => rank.problem).problem)}`) : "");
    const shown = all.length > MOST_RANKS ? [...all].sort(slowestFirst).slice(0, MOST_RANKS) : all;
    replace(more, all.length > shown.length ? `The ${MOST_RANKS} slowest of ${whole(all.length)} ranks.` : "");
    for (const rank of shown) {
      if (!drawn.has(rank.rank)) drawn.set(rank.rank, rankLine(rank));
      drawn.get(rank.rank).update(rank);
    }
    const nodes = shown.map((rank) => drawn.get(rank.rank).node);
    if (nodes.length !== ranks.children.length || nodes.some((child, index) => ranks.children[index] !== child)) replace(ranks, nodes);
  }

  return { node, update };
}

function rankLine(first) {
  const bar = progressBar(`Rank ${first.rank}`);
  const state = el("span", { class: "rank-state" });
  const node = el("li", { class: "rank" }, el("span", { class: "rank-name", title: visible(first.host || "") }, `rank ${first.rank}`), bar.node, state);

  function update(rank) {
    const silent = rank.silent_s > SILENT_S;
    node.classList.toggle("trouble", Boolean(rank.problem));
    node.classList.toggle("silent", !rank.problem && silent);
    bar.update(rank.written, rank.total, undefined);
    replace(state, rank.problem ? visible(rank.problem) : silent ? `silent for ${duration(rank.silent_s)}` : visible(rank.phase || ""));
  }

  return { node, update };
}

function slowestFirst(a, b) {
  const share = (rank) => (rank.problem ? -1 : rank.total ? rank.written / rank.total : 0);
  return share(a) - share(b) || a.rank - b.rank;
}
