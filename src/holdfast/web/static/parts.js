// Small pieces that every view uses: sections, states of loading and failing, progress, tables.

import { byId, el, replace } from "./dom.js";
import { visible, whole } from "./text.js";

export function section(title, note, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", { class: "section", "aria-labelledby": id },
    el("div", { class: "margin" }, el("h2", { id }, title), note ? el("p", { class: "note" }, note) : null),
    el("div", { class: "body" }, children));
}

export function loading(what) {
  return el("p", { class: "loading", role: "status" }, `Reading ${what} …`);
}

export function empty(text) {
  return el("p", { class: "empty" }, text);
}

export function failed(error, again) {
  return el("div", { class: "failed", role: "alert" },
    el("p", null, visible(error.message || error)),
    again ? el("button", { type: "button", class: "button", onclick: again }, "Try again") : null);
}

export function badge(text, kind) {
  return el("span", { class: `badge ${kind || ""}` }, visible(text));
}

export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined && pair[1] !== "")
    .map(([name, content]) => el("div", null, el("dt", null, name), el("dd", null, content))));
}

export function progressBar(label) {
  const fillNode = el("div", { class: "progress-fill" });
  const bar = el("div", { class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, fillNode);
  const text = el("span", { class: "progress-text" });
  function update(done, total, words) {
    const share = total > 0 ? Math.min(1, done / total) : 0;
    bar.classList.toggle("unmeasured", !(total > 0));
    bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    fillNode.style.width = `${share * 100}%`;
    text.textContent = words === undefined ? `${Math.round(share * 100)}%` : words;
  }
  update(0, 0, "");
  return { node: el("div", { class: "progress-line" }, bar, text), update };
}

export function simpleTable(label, columns, rows) {
  return el("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": label },
    el("table", { class: "plain" }, el("caption", { class: "unseen" }, label),
      el("thead", null, el("tr", null, columns.map((column) => el("th", { scope: "col", class: column.class }, column.label)))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map((cell, index) => el(index ? "td" : "th", { scope: index ? null : "row", class: columns[index].class }, cell)))))));
}

// A table of at most `most` rows at first, the rest behind a button: for lists that are nearly always short.
export function shortTable(label, columns, rows, most, kept = {}) {
  most = Math.max(most, kept.most || 0);
  const holder = el("div", null, simpleTable(label, columns, rows.slice(0, most)));
  if (rows.length > most) {
    const next = Math.min(rows.length, most * 10);
    holder.append(el("button", { type: "button", class: "button", onclick: () => { kept.most = next; replace(holder, shortTable(label, columns, rows, next, kept)); } },
      next === rows.length ? `Show all ${whole(next)}` : `Show ${whole(next)} of ${whole(rows.length)}`));
  }
  return holder;
}

// Draws the children anew; who is among them with the keyboard stays where they were.
export function redraw(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  replace(node, ...children);
  if (!focused) return;
  const same = (other) => other.tagName === focused.tagName && other.textContent === focused.textContent && other.getAttribute("href") === focused.getAttribute("href") && other.getAttribute("aria-label") === focused.getAttribute("aria-label");
  const target = node.contains(focused) ? focused : [...node.querySelectorAll(focused.tagName)].find(same);
  if (target) target.focus({ preventScroll: true });
}

export function announce(text) {
  byId("announcer").textContent = text;
}

export function crumbs(entries) {
  replace(byId("crumbs"), el("ol", null, entries.map(([text, href]) => el("li", null, href ? el("a", { href }, text) : el("span", { "aria-current": "page" }, text)))));
  const last = entries[entries.length - 1];
  document.title = last ? `${last[0]} · Holdfast` : "Holdfast";
}

export function setLinkState(state) {
  const node = byId("link-state");
  node.dataset.state = state;
  node.textContent = { live: "live", lost: "connection lost, trying again", report: "report", none: "" }[state];
}

// Any JSON, folded: objects and lists open one by one, so that a large state costs nothing until it is looked at.
export function jsonTree(name, content, open) {
  if (content === null || typeof content !== "object") {
    return el("div", { class: "json-leaf" }, el("span", { class: "json-name" }, visible(name)), el("span", { class: `json-${content === null ? "null" : typeof content}` }, visible(content)));
  }
  const entries = Array.isArray(content) ? content.map((item, index) => [String(index), item]) : Object.entries(content);
  const body = el("div", { class: "json-body" });
  const details = el("details", { class: "json" },
    el("summary", null, el("span", { class: "json-name" }, visible(name)), el("span", { class: "json-count" }, Array.isArray(content) ? `[${entries.length}]` : `{${entries.length}}`)), body);
  const draw = () => { if (!body.childNodes.length) appendSome(body, entries, 0); };
  details.addEventListener("toggle", () => details.open && draw());
  if (open) { details.open = true; draw(); }
  return details;
}

function appendSome(body, entries, start) {
  const end = Math.min(entries.length, start + 200);
  body.append(...entries.slice(start, end).map(([key, item]) => jsonTree(key, item)));
  if (end < entries.length) {
    const more = el("button", { type: "button", class: "quiet", onclick: () => { more.remove(); appendSome(body, entries, end); } }, `${whole(entries.length - end)} more`);
    body.append(more);
  }
}
