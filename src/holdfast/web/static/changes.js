// What changes something, offered only where the server was started with --allow-changes, each confirmed.

import { get, isReport, runAddress, send, stepAddress } from "./data.js";
import { el, replace } from "./dom.js";
import { failed } from "./parts.js";
import { count, list, stepName, visible } from "./text.js";

export function changesPanel(now, going, signal) {
  const node = el("div", { class: "changes" });
  if (!isReport() && going.length) offer(node, now, going, signal);
  return node;
}

export async function allowed(signal) {
  return !isReport() && (await get("/api/about", null, signal)).changes_allowed === true;
}

async function offer(node, now, going, signal) {
  if (!(await allowed(signal).catch(() => false))) return;
  const folders = going.map((row) => row.folder);
  const words = `Delete ${count(folders.length, "step")} now: ${list(folders.map(stepName), 4)}. This cannot be undone.`;
  replace(node, confirmed("Delete what goes next …", words, "Delete", () => send("POST", `${runAddress(now.id)}/gc`, { folders, confirm: true }, signal)));
}

// A tag is added with a name, and each tag that is there can be taken off.
export function tagPanel(run, step, tags, done, signal) {
  const name = el("input", { class: "search", "aria-label": "New tag", placeholder: "tag", required: true, maxlength: 100 });
  const problem = el("div");
  const change = async (method, tag) => {
    try {
      await send(method, `${stepAddress(run, step)}/tag`, { name: tag }, signal);
      done();
    } catch (error) {
      replace(problem, failed(error));
    }
  };
  const form = el("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); change("POST", name.value.trim()); } }, name, el("button", { class: "button" }, "Tag this step"));
  return el("div", { class: "changes" }, form, tags.map((tag) => confirmed(`Remove tag ${visible(tag)} …`, `Remove the tag ${visible(tag)}? The step may then be deleted by the rules.`, "Remove", () => change("DELETE", tag))), problem);
}

function confirmed(label, words, verb, action) {
  const node = el("div", { class: "confirm" });
  const ask = () => {
    const yes = el("button", { type: "button", class: "button danger", onclick: run }, verb);
    replace(node, el("p", { role: "alert" }, words), yes, el("button", { type: "button", class: "button", onclick: start }, "Cancel"));
    node.querySelector("button:last-child").focus();
  };
  const start = () => replace(node, el("button", { type: "button", class: "button", onclick: ask }, label));
  const run = async () => {
    try {
      await action();
      start();
    } catch (error) {
      replace(node, failed(error, start));
    }
  };
  start();
  return node;
}
