"use strict";
// The page: what is chosen, and which chart shows what. The data is the JSON in #data.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const AXES = { epoch: "epochs", step: "steps", time: "training time" };
const FIRST_CHARTS = 12; // the others are drawn when they are opened
const chosen = { axis: "epoch", weight: 0, log: false, marks: true, fit: DATA.fit, hidden: new Set() };
const drawings = []; // functions that draw anew what is visible

function fits() {
  const names = new Set(RUNS.flatMap((run) => Object.keys(run.fits)));
  return [...names].sort((a, b) => parseInt(a) - parseInt(b) || a.localeCompare(b));
}

// -- the controls

function control(bar, label, input) {
  const node = html("label", "", bar);
  if (input.type === "checkbox") node.append(input, label);
  else node.append(label, input);
  return input;
}

function checkbox(bar, label, checked, change) {
  const input = html("input");
  input.type = "checkbox";
  input.checked = checked;
  input.addEventListener("change", () => { change(input.checked); drawAll(); });
  return control(bar, label, input);
}

function axisChoice(bar) {
  const group = html("fieldset", "", bar);
  html("legend", "", group, "Horizontal");
  const segments = html("div", "segments", group);
  for (const [axis, name] of Object.entries(AXES)) {
    const label = html("label", "", segments);
    const input = html("input", "", label);
    Object.assign(input, { type: "radio", name: "axis", value: axis, checked: axis === chosen.axis });
    input.addEventListener("change", () => { chosen.axis = axis; drawAll(); });
    label.append(name);
  }
}

function smoothing(bar) {
  const input = html("input");
  Object.assign(input, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing" });
  const shown = document.createTextNode("0");
  input.addEventListener("input", () => {
    chosen.weight = Number(input.value);
    shown.data = input.value;
    drawAll();
  });
  control(bar, "Smoothing", input).parentNode.append(shown);
}

function fitChoice(bar) {
  if (fits().length < 2) return;
  const select = html("select");
  for (const name of fits()) {
    const option = html("option", "", select, name);
    option.selected = name === chosen.fit;
  }
  select.addEventListener("change", () => { chosen.fit = select.value; makeCharts(); });
  control(bar, "Call of fit", select);
}

function runChoice(bar) {
  if (RUNS.length < 2) return;
  RUNS.forEach((run, k) => {
    const input = checkbox(bar, "", true, (on) => { on ? chosen.hidden.delete(k) : chosen.hidden.add(k); });
    html("span", `swatch run-${k % 6}`, input.parentNode);
    input.parentNode.append(run.name);
  });
}

function makeToolbar() {
  const bar = document.getElementById("toolbar");
  axisChoice(bar);
  smoothing(bar);
  checkbox(bar, "Log scale", false, (on) => { chosen.log = on; });
  checkbox(bar, "Marks", true, (on) => { chosen.marks = on; });
  fitChoice(bar);
  runChoice(bar);
}

// -- the charts

function makeCharts() {
  const place = document.getElementById("charts");
  place.replaceChildren();
  drawings.length = 0;
  const curves = RUNS.flatMap((run) => (run.fits[chosen.fit] || { curves: [] }).curves);
  const metrics = [...new Set(curves.map((curve) => curve.metric))];
  document.getElementById("curves").hidden = !metrics.length;
  addGrid(place, metrics.slice(0, FIRST_CHARTS));
  const more = metrics.slice(FIRST_CHARTS);
  if (more.length) {
    const details = html("details", "", place);
    html("summary", "", details, `${more.length} more metrics`);
    details.addEventListener("toggle", () => { if (details.children.length < 2) addGrid(details, more); });
  }
}

function addGrid(place, metrics) {
  const grid = html("div", "grid", place);
  for (const metric of metrics) {
    const figure = html("figure", "", grid);
    const draw = () => drawMetric(figure, metric);
    drawings.push(draw);
    draw();
  }
}

function drawMetric(figure, metric) {
  const lines = [], marks = [];
  RUNS.forEach((run, k) => {
    const fit = run.fits[chosen.fit];
    if (!fit || chosen.hidden.has(k)) return;
    for (const curve of fit.curves) if (curve.metric === metric) lines.push(lineOf(curve, k));
    if (!chosen.marks) return;
    for (const mark of fit.marks) marks.push({ ...mark, at: mark[chosen.axis], text: labelled(k, mark.text) });
  });
  drawCaption(figure, metric, lines);
  const options = { log: chosen.log, time: chosen.axis === "time", xName: AXES[chosen.axis], title: metric };
  drawChart(figure, lines, RUNS.length > 1 ? marks.filter((mark) => !isSmall(mark)) : marks, options);
}

const labelled = (k, text) => (RUNS.length > 1 ? `${RUNS[k].name}: ${text}` : text);

// One run: training and validation differ in colour; several: runs do. Validation is dashed.
function lineOf(curve, k) {
  const part = curve.validation ? "validation" : "training";
  const color = RUNS.length > 1 ? k % 6 : Number(curve.validation);
  const dash = Number(curve.validation) + 2 * Number(k >= 6);
  const line = { label: labelled(k, part), color, dash, x: curve[chosen.axis], y: curve.value, raw: null };
  if (chosen.weight > 0) {
    const base = curve.means || curve;
    line.raw = { x: line.x, y: line.y };
    line.x = base[chosen.axis];
    line.y = smoothed(base.value, chosen.weight);
  }
  return line;
}

function drawCaption(figure, metric, lines) {
  let caption = figure.querySelector("figcaption");
  if (!caption) caption = html("figcaption", "", figure);
  caption.replaceChildren(metric);
  const keys = html("div", "keys", caption);
  for (const line of lines) {
    const key = html("span", "", keys);
    const sample = svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, key);
    sample.style.width = "26px";
    svg("path", { class: "curve", d: "M0 4H26", stroke: `var(--run-${line.color})`, "stroke-dasharray": DASHES[line.dash] }, sample);
    key.append(line.label);
  }
}

// -- what happened, by the clock

function drawTimeline() {
  const place = document.getElementById("timeline");
  place.replaceChildren();
  const width = Math.max(place.clientWidth, 240), row = 46, left = 8;
  const length = Math.max(1, ...RUNS.flatMap((run) => [...run.spans.map((span) => span[2]), ...run.marks.map((mark) => mark.time)]));
  const height = RUNS.length * row + 24;
  const x = makeScale(0, length, left, width - 14, false, (a, b) => timeTicks(a, b, Math.max(3, Math.floor(width / 110))));
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "When each run trained, and what happened; the list below has it as text" }, place);
  for (const tick of x.ticks) {
    svg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 0, y2: height - 20 }, root);
    svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, root, secondsText(tick));
  }
  RUNS.forEach((run, k) => drawLane(root, run, k, k * row, x));
}

function drawLane(root, run, k, top, x) {
  svg("text", { class: "name", x: x(0), y: top + 12 }, root, RUNS.length > 1 ? run.name : "training");
  for (const [kind, begin, end] of run.spans) {
    const fill = kind === "training" ? `var(--run-${k % 6})` : "var(--bad)";
    const bar = svg("rect", { x: x(begin), y: top + 30, width: Math.max(x(end) - x(begin), 1.5), height: 10, rx: 2, fill }, root);
    svg("title", {}, bar, `${kind}: ${secondsText(end - begin)}`);
  }
  for (const mark of run.marks) {
    const small = isSmall(mark);
    const node = svg("text", { class: `glyph of-${mark.kind}`, x: x(mark.time), y: top + (small ? 29 : 27), "text-anchor": "middle" }, root, GLYPHS[mark.kind] || "•");
    svg("title", {}, node, `${secondsText(mark.time)}: ${mark.text}`);
  }
}

// -- where the time went

function drawTimes(chosenRow = 0) {
  const place = document.getElementById("times");
  const runs = RUNS.filter((run) => run.times.length);
  if (!place || !runs.length) return;
  place.replaceChildren();
  const kinds = [...new Set(runs.flatMap((run) => run.times[0].ranks.flatMap(Object.keys)))];
  const total = (kind) => runs.reduce((sum, run) => sum + run.times[0].ranks.reduce((s, rank) => s + (rank[kind] || 0), 0), 0);
  kinds.sort((a, b) => total(b) - total(a));
  if (runs[0].times.length > 1) { // the rows of all runs are of the same epochs
    const select = html("select");
    runs[0].times.forEach((row, k) => { html("option", "", select, row.label).selected = k === chosenRow; });
    select.addEventListener("change", () => drawTimes(select.selectedIndex));
    control(html("div", "toolbar", place), "Time of", select);
  }
  const figure = html("figure", "", place);
  const keys = html("div", "keys", figure);
  const small = kinds.length > 8 ? kinds.splice(7) : []; // there are eight colours
  if (small.length) kinds.push("others");
  kinds.forEach((kind, k) => {
    const key = html("span", "", keys);
    html("span", "swatch", key).style.background = `var(--kind-${k})`;
    key.append(kind);
  });
  runs.forEach((run) => drawRanks(figure, run, run.times[chosenRow], kinds, small));
}

function drawRanks(figure, run, row, kinds, small) {
  const width = Math.max(figure.clientWidth, 240), bar = 20;
  const left = Math.min(12 + 6.6 * Math.max(...row.names.map((name) => name.length)), width / 2);
  const sums = row.ranks.map((rank) => Object.values(rank).reduce((a, b) => a + b, 0));
  const longest = Math.max(...sums, 1e-9);
  if (RUNS.length > 1) html("h3", "", figure, run.name);
  if (!row.ranks.length) return void html("p", "quiet", figure, "No times are recorded of these epochs.");
  const height = row.ranks.length * (bar + 5) + 4;
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Shares of time by rank, ${row.label}; the table below has them as text` }, figure);
  row.ranks.forEach((rank, number) => {
    const top = number * (bar + 5) + 4;
    const seconds = { ...rank, others: small.reduce((sum, kind) => sum + (rank[kind] || 0), 0) };
    let at = left;
    svg("text", { class: "name", x: 0, y: top + 14 }, root, row.names[number]);
    kinds.forEach((kind, k) => {
      const size = ((seconds[kind] || 0) / longest) * (width - left - 4);
      if (!size) return;
      const part = svg("rect", { x: at, y: top, width: size, height: bar, fill: `var(--kind-${k})` }, root);
      svg("title", {}, part, `${kind}: ${secondsText(seconds[kind])}, ${((seconds[kind] / sums[number]) * 100).toFixed(1)} %`);
      at += size;
    });
  });
}

// -- the start

function drawAll() {
  for (const draw of drawings) draw();
}

function redraw() {
  drawAll();
  drawTimeline();
  drawTimes();
  drawSchedules();
}

makeThemeButton();
makeToolbar();
makeCharts();
drawTimeline();
drawTimes();
drawSchedules();
let waiting;
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnWidth) return;
  drawnWidth = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 120);
});
