"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Sorting: a click on a heading, again for the other way; what was not measured stays last.
function sort(heading) {
  const table = heading.closest("table"), body = table.tBodies[0];
  const place = heading.cellIndex;
  const down = heading.getAttribute("aria-sort") === "ascending";
  const value = (row) => {
    const cell = row.cells[place];
    if (!heading.classList.contains("number")) return cell.textContent;
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  };
  const rows = [...body.rows].sort((one, other) => {
    const a = value(one), b = value(other);
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return down ? -order : order;
  });
  all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}
all("th button").forEach((button) =>
  button.addEventListener("click", () => sort(button.parentElement)));

// Filtering: all words, and the chosen values; everything that shows a cell follows.
const texts = new Map(), places = new Map();
all("section#all-cells th").forEach((each) => places.set(each.dataset.key, each.cellIndex));
all("section#all-cells tbody tr").forEach((row) => texts.set(row.dataset.cell, row));
function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/);
  const chosen = all(".filters select").filter((each) => each.value !== "");
  let count = 0;
  const shown = new Set();
  for (const [cell, row] of texts) {
    const text = row.textContent.toLowerCase();
    const fits = words.every((word) => text.includes(word)) && chosen.every((each) =>
      row.cells[places.get(each.dataset.key)].textContent === each.value);
    if (fits) { shown.add(cell); count += 1; }
  }
  all("[data-cell]:not(circle)").forEach((each) => { each.hidden = !shown.has(each.dataset.cell); });
  all(".line").forEach((line) => {
    const own = all("circle", line).map((each) => each.dataset.cell);
    line.style.display = own.some((cell) => shown.has(cell)) ? "" : "none";
  });
  all("figure:has(ul.bars)").forEach((each) => {
    each.hidden = !all("li", each).some((row) => !row.hidden);
  });
  document.getElementById("count").value =
    count === texts.size ? `${count} cells` : `${count} of ${texts.size} cells`;
}
all(".filters input, .filters select").forEach((each) => each.addEventListener("input", filter));
all(".all-columns").forEach((box) => box.addEventListener("change", () =>
  box.closest("section").querySelector("table").classList.toggle("narrow", !box.checked)));

all("button.copy").forEach((button) => button.addEventListener("click", () => {
  const range = document.createRange(), selection = getSelection();
  range.selectNodeContents(button.parentElement.querySelector("code"));
  selection.removeAllRanges();
  selection.addRange(range);
  button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
}));
