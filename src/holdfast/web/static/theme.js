// Light, dark, or as the system says. The choice stays in this browser.

import { byId } from "./dom.js";

const NAMES = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const SIGNS = { system: "◐", light: "○", dark: "●" };
const ORDER = ["system", "light", "dark"];
const NAME = "holdfast-theme";

export function startTheme() {
  apply(stored());
  byId("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

export function nextTheme() {
  const now = document.documentElement.dataset.theme || "system";
  apply(ORDER[(ORDER.indexOf(now) + 1) % ORDER.length]);
  changed();
}

// The value of a color as the stylesheet has it now, for a canvas.
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function onThemeChange(listener, signal) {
  document.addEventListener("themechange", listener, { signal });
}

function changed() {
  document.dispatchEvent(new Event("themechange"));
}

function apply(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const button = byId("theme");
  button.textContent = SIGNS[theme];
  button.title = NAMES[theme];
  button.setAttribute("aria-label", NAMES[theme]);
  try {
    localStorage.setItem(NAME, theme);
  } catch {
    return; // a browser that keeps nothing still shows the page
  }
}

function stored() {
  try {
    const theme = localStorage.getItem(NAME);
    return ORDER.includes(theme) ? theme : "system";
  } catch {
    return "system";
  }
}
