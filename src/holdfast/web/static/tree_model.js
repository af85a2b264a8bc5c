// The tree of a checkpoint's tensors as a flat list of what is unfolded; pages of children are asked for when they are in sight.

export const PAGE = 200;

export function branch(group, prefix, depth, fold) {
  return { group, prefix, depth, fold, total: null, rows: [], asked: new Set(), open: new Map(), error: null };
}

// Entries in order: {node, index, row, depth}; row is null while its page is on the way.
export function flattened(root) {
  const found = [];
  walk(root, found);
  return found;
}

function walk(node, found) {
  if (node.error) found.push({ node, index: -1, row: null, depth: node.depth, error: node.error });
  const total = node.total === null ? (node.error ? 0 : 1) : node.total;
  for (let index = 0; index < total; index += 1) {
    found.push({ node, index, row: node.rows[index] || null, depth: node.depth });
    const child = node.open.size ? node.open.get(index) : null;
    if (child) walk(child, found);
  }
}

// Reads the page that holds `index`, once. fetchRows(query) gives {total, rows}.
export async function readPage(node, index, fetchRows) {
  const offset = Math.floor(Math.max(0, index) / PAGE) * PAGE;
  if (node.asked.has(offset)) return false;
  node.asked.add(offset);
  try {
    const answer = await fetchRows({ group: node.group, prefix: node.prefix, fold: node.fold, offset, limit: PAGE });
    node.total = answer.total;
    node.error = null;
    answer.rows.forEach((row, place) => { node.rows[offset + place] = row; });
  } catch (error) {
    node.asked.delete(offset);
    if (error.name === "AbortError") throw error;
    node.error = error;
  }
  return true;
}

export function unfoldable(row) {
  return row !== null && row.prefix !== "" && (row.kind === "folder" || row.kind === "folded");
}

// What unfolds below a row. A folded row stands for folders that are alike: its children are those folders, one by one.
export function childOf(node, index) {
  const row = node.rows[index];
  if (row.kind !== "folded") return branch(node.group, row.prefix, node.depth + 1, node.fold);
  const child = branch(node.group, node.prefix, node.depth + 1, row.key ? 0 : node.fold);
  if (row.key) return child;
  const before = node.prefix ? `${node.prefix}.` : "";
  child.rows = row.alike.map((number) => ({ ...row, kind: "folder", name: String(number), prefix: `${before}${number}`, alike: [] }));
  child.total = child.rows.length;
  for (let offset = 0; offset < child.total; offset += PAGE) child.asked.add(offset);
  return child;
}

export function largestFolder(rows) {
  let best = -1;
  rows.forEach((row, index) => {
    if (row.kind === "folder" && row.prefix && row.tensors > 1 && (best < 0 || row.bytes > rows[best].bytes)) best = index;
  });
  return best;
}

// Which layers a folded row stands for: 0-31, or 0, 2, 5.
export function numbersText(numbers) {
  const parts = [];
  let start = 0;
  for (let index = 1; index <= numbers.length; index += 1) {
    if (index < numbers.length && numbers[index] === numbers[index - 1] + 1) continue;
    parts.push(start === index - 1 ? String(numbers[start]) : `${numbers[start]}–${numbers[index - 1]}`);
    start = index;
  }
  return parts.length > 6 ? `${parts.slice(0, 5).join(", ")} … (${numbers.length})` : parts.join(", ");
}
