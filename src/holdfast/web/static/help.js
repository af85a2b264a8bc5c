// Shortcuts, and the dialog that `?` opens: the keys, and the words of the page.

import { byId, el, replace } from "./dom.js";
import { wordList } from "./glossary.js";
import { nextTheme } from "./theme.js";

const SHORTCUTS = [
  ["?", "this list"],
  ["g r", "all runs"],
  ["u", "up: from a checkpoint to its run, from a run to all runs"],
  ["/", "search or filter, where there is a field for it"],
  ["t", "theme: as the system, light, dark"],
  ["↑ ↓", "move in a table, a tree or a chart; Home, End, Page keys too"],
  ["← →", "fold and unfold in a tree; move in a chart"],
  ["Enter", "open the row or the step under the cursor"],
  ["Space", "choose a step for a comparison (two at most)"],
  ["c", "compare the two chosen steps, or this checkpoint with its parent"],
  ["v", "verify this checkpoint"],
  ["Esc", "close a dialog; leave a field"],
];

const actions = new Map();
let waiting = "";

// A view offers what `c` or `v` does while it is shown.
export function setShortcuts(entries) {
  actions.clear();
  for (const [key, action] of Object.entries(entries || {})) actions.set(key, action);
}

export function startHelp() {
  const dialog = byId("help");
  replace(dialog,
    el("h2", { id: "help-title" }, "Keyboard"),
    el("dl", { class: "keys" }, SHORTCUTS.map(([keys, text]) => [el("dt", null, keys.split(" ").map((key) => el("kbd", null, key))), el("dd", null, text)])),
    el("h2", null, "Words"), wordList(),
    el("form", { method: "dialog" }, el("button", { class: "button" }, "Close")));
  byId("help-button").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => pressed(event, dialog));
}

function pressed(event, dialog) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  const inField = event.target.closest("input, textarea, select");
  if (inField) {
    if (event.key === "Escape") inField.blur();
    return;
  }
  const action = chosen(event.key, dialog);
  waiting = event.key === "g" ? "g" : "";
  if (!action) return;
  event.preventDefault();
  action();
}

function chosen(key, dialog) {
  if (waiting === "g" && key === "r") return () => { location.hash = "#/"; };
  if (key === "?") return () => dialog.showModal();
  if (key === "t") return nextTheme;
  if (key === "u") return up;
  if (key === "/") return () => document.querySelector("input[type=search]")?.focus();
  return actions.get(key);
}

function up() {
  const links = [...byId("crumbs").querySelectorAll("a")];
  if (links.length) location.hash = links[links.length - 1].getAttribute("href");
}
