"use strict";
// Charts in SVG, drawn by hand. Names and texts are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
const GLYPHS = {
  start: "▸", resume: "↻", checkpoint: "▾", rollback: "↩", ranks: "✕", slow: "!", warning: "▵",
  interrupted: "■", failed: "✕", finished: "✓",
};

function svg(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// -- numbers as text

function numberText(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(5)));
}

function tickText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e\+?/, "e");
  return String(Number(value.toPrecision(6)));
}

function secondsText(seconds) {
  const size = Math.abs(seconds);
  if (size < 90) return `${Number(seconds.toPrecision(3))} s`;
  if (size < 5400) return `${Number((seconds / 60).toPrecision(3))} min`;
  if (size < 172800) return `${Number((seconds / 3600).toPrecision(3))} h`;
  return `${Number((seconds / 86400).toPrecision(3))} days`;
}

// -- scales

function linearTicks(low, high, count, units = [1, 2, 5, 10]) {
  const size = Math.max(high - low, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(size / count));
  const step = power * units.find((unit) => unit * power * count >= size * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step && ticks.length < 50; k++) ticks.push(k * step);
  return ticks;
}

function timeTicks(low, high, count) {
  const lengths = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
  const step = lengths.find((length) => length * count >= high - low);
  if (high - low < count || step === undefined) return linearTicks(low, high, count);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high && ticks.length < 50; at += step) ticks.push(at);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const decades = Math.log10(high / low);
  const every = Math.max(1, Math.ceil(decades / 6));
  const digits = decades < 2.2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    for (const digit of digits) {
      const tick = digit * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks.length > 1 ? ticks : [low, high];
}

// A function from values to places, with its ticks.
function makeScale(low, high, from, to, log, ticks) {
  if (log && !(low > 0)) [low, high] = [1, 10]; // no value can be drawn
  const around = log ? low / 2 : Math.max(0.5, Math.abs(low) / 100);
  if (!(low < high)) [low, high] = [low - around, low + around];
  [low, high] = [Math.max(low, -Number.MAX_VALUE), Math.min(high, Number.MAX_VALUE)];
  const of = log ? Math.log : (value) => value / 2; // half of it: a difference is finite
  const scale = (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
  return Object.assign(scale, { low, high, ticks: log ? logTicks(low, high) : ticks(low, high) });
}

// Marks that come often have a sign below the others, and no line.
const isSmall = (mark) => mark.kind === "checkpoint" || mark.kind === "warning";

const isFinite_ = (value) => typeof value === "number" && Number.isFinite(value);

// Debiased exponential moving average; what is no finite number is left out.
function smoothed(values, weight) {
  let sum = 0, seen = 0;
  return values.map((value) => {
    if (!isFinite_(value)) return value;
    sum = sum * weight + (1 - weight) * value;
    seen = seen * weight + (1 - weight);
    return sum / seen;
  });
}

// The path of a line; it is broken where a value is no number, or not drawable on a log scale.
function pathOf(xs, ys, x, y, log) {
  const parts = [];
  let pen = "M";
  for (let k = 0; k < ys.length; k++) {
    if (!isFinite_(ys[k]) || !isFinite_(xs[k]) || (log && ys[k] <= 0)) { pen = "M"; continue; }
    parts.push(`${pen}${x(xs[k]).toFixed(1)} ${y(ys[k]).toFixed(1)}`);
    pen = "L";
  }
  return parts.join("");
}

function extent(lists, usable) {
  let low = Infinity, high = -Infinity;
  for (const values of lists) {
    for (const value of values) {
      if (!isFinite_(value) || !usable(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

// -- a chart of curves

const EDGE = { left: 54, right: 14, top: 16, bottom: 24 };

/* Draws lines into a figure.
   lines: [{label, color, dash, x, y, raw: {x, y} or null}], marks: [{kind, text, at}],
   options: {log, time, xName, title, height}. */
function drawChart(figure, lines, marks, options) {
  figure.querySelectorAll(":scope > svg, :scope > .tip").forEach((node) => node.remove());
  const width = Math.max(figure.clientWidth, 240), height = options.height || 230;
  const every = lines.flatMap((line) => (line.raw ? [line, line.raw] : [line]));
  const [left, right] = extent(every.map((line) => line.x), () => true);
  const [low, high] = extent(every.map((line) => line.y), (value) => !options.log || value > 0);
  const pad = options.log ? 0 : (high / 2 - low / 2) * 0.1;
  const xTicks = (a, b) => (options.time ? timeTicks : linearTicks)(a, b, Math.max(3, Math.floor(width / 75)));
  const x = makeScale(left, right, EDGE.left, width - EDGE.right, false, xTicks);
  const y = makeScale(low - pad, high + pad, height - EDGE.bottom, EDGE.top, options.log, (a, b) => linearTicks(a, b, 5));
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(lines, options) });
  drawAxes(root, x, y, width, height, options);
  for (const mark of marks) drawMark(root, mark, x, height);
  for (const line of lines) {
    const style = { stroke: `var(--run-${line.color})`, "stroke-dasharray": DASHES[line.dash] };
    if (line.raw) svg("path", { ...style, "stroke-dasharray": "", class: "curve raw", d: pathOf(line.raw.x, line.raw.y, x, y, options.log) }, root);
    svg("path", { ...style, class: "curve", d: pathOf(line.x, line.y, x, y, options.log) }, root);
    drawSingles(root, line, x, y, options.log);
  }
  figure.append(root);
  addHover(figure, root, lines, x, y, width, height, options);
}

function drawAxes(root, x, y, width, height, options) {
  for (const tick of y.ticks) {
    const at = y(tick);
    svg("line", { class: "gridline", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }, root);
    svg("text", { x: EDGE.left - 7, y: at + 4, "text-anchor": "end" }, root, tickText(tick));
  }
  const bottom = height - EDGE.bottom;
  svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom }, root);
  for (const tick of x.ticks) {
    svg("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, root, options.time ? secondsText(tick) : tickText(tick));
  }
}

// Single points, of which a path shows nothing, and values that are no numbers.
function drawSingles(root, line, x, y, log) {
  const fill = `var(--run-${line.color})`;
  const drawn = (k) => isFinite_(line.y[k]) && !(log && line.y[k] <= 0);
  for (let k = 0; k < line.y.length; k++) {
    if (!isFinite_(line.x[k])) continue;
    if (!isFinite_(line.y[k])) svg("text", { x: x(line.x[k]), y: EDGE.top + 2, "text-anchor": "middle", class: "glyph of-failed" }, root, "×");
    else if (drawn(k) && !drawn(k - 1) && !drawn(k + 1)) svg("circle", { cx: x(line.x[k]), cy: y(line.y[k]), r: 3, fill }, root);
  }
}

function drawMark(root, mark, x, height) {
  if (!isFinite_(mark.at) || mark.at < x.low || mark.at > x.high) return;
  const at = x(mark.at), group = svg("g", {}, root);
  const small = isSmall(mark);
  if (!small) svg("line", { class: `mark of-${mark.kind}`, x1: at, x2: at, y1: EDGE.top, y2: height - EDGE.bottom }, group);
  svg("text", { class: `glyph of-${mark.kind}`, x: at, y: small ? height - EDGE.bottom : EDGE.top - 3, "text-anchor": "middle" }, group, GLYPHS[mark.kind] || "•");
  svg("title", {}, group, mark.text);
}

function describe(lines, options) {
  const parts = lines.map((line) => {
    const values = line.y.filter(isFinite_);
    if (!values.length) return `${line.label}: no finite values`;
    return `${line.label}: from ${numberText(values[0])} to ${numberText(values[values.length - 1])}`;
  });
  return `${options.title} by ${options.xName}. ${parts.join("; ")}`;
}

// -- the values under the pointer

function nearest(xs, at) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}

function addHover(figure, root, lines, x, y, width, height, options) {
  const layer = svg("g", {}, root);
  const tip = html("div", "tip", figure);
  tip.hidden = true;
  const leave = () => { layer.replaceChildren(); tip.hidden = true; };
  root.addEventListener("pointerleave", leave);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - EDGE.left) / (width - EDGE.left - EDGE.right);
    const at = x.low + Math.min(Math.max(share, 0), 1) * (x.high - x.low);
    layer.replaceChildren();
    tip.replaceChildren();
    svg("line", { class: "cross", x1: x(at), x2: x(at), y1: EDGE.top, y2: height - EDGE.bottom }, layer);
    html("div", "quiet", tip, `${options.xName} ${options.time ? secondsText(at) : numberText(Number(at.toPrecision(4)))}`);
    for (const line of lines) {
      if (!line.x.length) continue;
      const k = nearest(line.x, at);
      html("div", "", tip, `${line.label}: ${numberText(line.y[k])}`);
      if (isFinite_(line.y[k]) && !(options.log && line.y[k] <= 0)) svg("circle", { class: "dot", cx: x(line.x[k]), cy: y(line.y[k]), r: 4, fill: `var(--run-${line.color})` }, layer);
    }
    tip.hidden = false;
    const place = ((x(at) / width) * figure.clientWidth);
    tip.style.top = `${root.offsetTop ?? 40}px`;
    tip.style.left = place < figure.clientWidth / 2 ? `${place + 12}px` : "";
    tip.style.right = place < figure.clientWidth / 2 ? "" : `${figure.clientWidth - place + 12}px`;
  });
}

// -- the theme

function makeThemeButton() {
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  let at = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    at = (at + 1) % themes.length;
    if (at) document.documentElement.dataset.theme = themes[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${themes[at]}`;
  });
}
