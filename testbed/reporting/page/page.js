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

// Timelines: lanes on a canvas; the labels beside it are text. Times are in microseconds.
function timeline(figure) {
  const { lanes, names, kinds, bars } = JSON.parse(figure.querySelector("script").textContent);
  const canvas = figure.querySelector("canvas"), told = figure.querySelector("output");
  const row = 18, top = 22, end = Math.max(1, ...bars.map((bar) => bar[3]));
  let from = 0, until = end, dragged = null, chosen = -1;
  const time = (us) => us >= 1e4 ? `${(us / 1e3).toPrecision(4)} ms` : `${us.toFixed(1)} us`;
  const words = (bar) => bar ? `${kinds[bar[1]]} ${names[bar[4]]}: ${time(bar[3] - bar[2])}, from ${time(bar[2])}` : "";
  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = top + row * lanes;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), style = getComputedStyle(figure);
    const colours = kinds.map((kind) => style.getPropertyValue(`--${kind}`) || style.color);
    const x = (us) => (us - from) / (until - from) * width;
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    const step = [1, 2, 5].flatMap((m) => [...Array(10).keys()].map((k) => m * 10 ** k))
      .sort((a, b) => a - b).find((each) => x(from + each) > 80) || end;
    for (let us = Math.ceil(from / step) * step; us <= until; us += step) {
      pen.fillStyle = style.getPropertyValue("--rule");
      pen.fillRect(x(us), 14, 1, height);
      pen.fillStyle = style.color;
      pen.fillText(`${+(us / 1e3).toPrecision(6)} ms`, x(us) + 2, 11);
    }
    bars.forEach(([lane, kind, begin, stop, name], place) => {
      if (stop < from || begin > until) return;
      const left = Math.max(0, x(begin)), wide = Math.max(1, Math.min(width, x(stop)) - left);
      pen.fillStyle = colours[kind];
      pen.fillRect(left, top + row * lane + 2, Math.max(1, wide - 0.5), row - 4);
      // what lies within a bar is drawn after it, and would cover the rest of its name
      const next = bars[place + 1], text = names[name];
      const room = next && next[0] === lane ? Math.min(wide, x(next[2]) - left) : wide;
      if (room > 20 && pen.measureText(text).width < room - 4) {
        pen.fillStyle = "#000000";
        pen.fillText(text, left + 3, top + row * lane + 13);
      }
    });
    if (chosen >= 0) {
      const [lane, , begin, stop] = bars[chosen];
      pen.strokeStyle = style.color;
      pen.lineWidth = 2;
      pen.strokeRect(x(begin), top + row * lane + 1, Math.max(2, x(stop) - x(begin)), row - 2);
    }
    if (dragged) {
      pen.fillStyle = "rgba(128, 128, 128, .3)";
      pen.fillRect(Math.min(...dragged), top, Math.abs(dragged[1] - dragged[0]), height);
    }
  }
  function show(left, right) {
    const wide = Math.min(end, Math.max(1, right - left));
    from = Math.min(Math.max(0, left), end - wide);
    until = from + wide;
    draw();
  }
  const at = (place) => from + place / canvas.clientWidth * (until - from);
  canvas.addEventListener("pointerdown", (event) => {
    dragged = [event.offsetX, event.offsetX];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) { dragged[1] = event.offsetX; draw(); }
    const us = at(event.offsetX), lane = Math.floor((event.offsetY - top) / row);
    const near = (until - from) / canvas.clientWidth;
    const found = bars.findLast((bar) => bar[0] === lane && bar[2] <= us + near && bar[3] >= us - near);
    told.value = words(found);
  });
  canvas.addEventListener("pointerup", () => {
    if (!dragged) return; // it was pressed elsewhere
    const [a, b] = dragged.sort((p, q) => p - q).map(at), enough = Math.abs(dragged[1] - dragged[0]) > 4;
    dragged = null;
    enough ? show(a, b) : draw();
  });
  canvas.addEventListener("pointercancel", () => { dragged = null; draw(); });
  // Keys: to the next or the previous event; one that is not in view comes into its middle.
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way || !bars.length || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    chosen = Math.min(Math.max(0, chosen + way), bars.length - 1);
    const [, , begin, stop] = bars[chosen], half = (until - from) / 2;
    told.value = words(bars[chosen]);
    stop < from || begin > until ? show(begin - half, begin + half) : draw();
  });
  const zoom = (left, right) => () => show(from + left * (until - from), until + right * (until - from));
  const ways = { in: zoom(0.25, -0.25), out: zoom(-0.5, 0.5), left: zoom(-0.5, -0.5), right: zoom(0.5, 0.5), all: () => show(0, end) };
  all("[data-zoom]", figure).forEach((button) =>
    button.addEventListener("click", () => ways[button.dataset.zoom]()));
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", draw);
}
all("figure.timeline").forEach(timeline);
