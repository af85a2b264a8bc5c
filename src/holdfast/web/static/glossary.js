// The words of the page that a newcomer asks about, each with one meaning. docs/page.md has the same sentences.

import { el } from "./dom.js";

export const WORDS = [
  ["committed", "the step is complete: its manifest, the record of all its files, is in place."],
  ["verified", "every byte of the step was read again since, and fits its digest."],
  ["publish", "make a step complete and visible to others; the time counts from the call of save."],
  ["stall", "how long training waited for a save."],
  ["branch", "the steps that descend from each other; a restore of an earlier step begins another branch."],
  ["set aside", "a step that a restore left behind, or found damaged: kept under another name."],
  ["goes next", "the step that the next save deletes, by the rules of the run."],
  ["box", "the rectangle of a tensor that a rank holds."],
  ["block", "a range of bytes of one file, written as a whole by one rank; each has a digest."],
];

export function meaning(word) {
  return WORDS.find(([name]) => name === word)[1];
}

export function wordList(names) {
  const chosen = names ? WORDS.filter(([name]) => names.includes(name)) : WORDS;
  return el("dl", { class: "words" }, chosen.map(([name, text]) => el("div", null, el("dt", null, name), el("dd", null, text))));
}

// A line that unfolds to the meaning of some words, where they are first met.
export function wordsHere(names) {
  return el("details", null, el("summary", null, "What these words mean"), wordList(names));
}
