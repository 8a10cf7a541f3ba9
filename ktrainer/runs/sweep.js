// The trials of a sweep as parallel coordinates: an axis for each key and for the metric, a line for each trial.

const SWEEP = JSON.parse(document.getElementById("data").textContent);
const chosen = SWEEP.axes.map(() => null); // [low, high] in pixels, of each axis

function axisScale(axis, bottom, top) {
  if (axis.kind === "choice") {
    const step = (bottom - top) / Math.max(axis.choices.length - 1, 1);
    const at = (value) => (axis.choices.length > 1 ? bottom - value * step : (bottom + top) / 2);
    return Object.assign(at, { ticks: axis.choices.map((_, k) => k), text: (k) => axis.choices[k] });
  }
  const scale = makeScale(axis.low, axis.high, bottom, top, axis.kind === "log", (a, b) => linearTicks(a, b, 6));
  return Object.assign(scale, { text: tickText });
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// From the best trial to the worst one; grey without a value.
function colorOf(trial) {
  if (trial.place === null) return "var(--quiet)";
  return `color-mix(in oklab, var(--run-1) ${(trial.place * 100).toFixed(1)}%, var(--run-0))`;
}

function drawParallel() {
  const place = document.getElementById("parallel");
  place.replaceChildren();
  const count = SWEEP.axes.length;
  const width = Math.max(place.clientWidth, 110 * count), height = 380, top = 44, bottom = height - 16;
  const x = (k) => 70 + (k * (width - 140)) / Math.max(count - 1, 1);
  const root = svg("svg", { class: "parallel", height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "The values that each trial tried, and what came of them; the table below has them as text" }, place);
  root.style.width = `${width}px`;
  const scales = SWEEP.axes.map((axis) => axisScale(axis, bottom, top));
  const lines = [...SWEEP.trials].sort((a, b) => (b.place ?? 2) - (a.place ?? 2)).map((trial) => {
    const points = trial.at.map((value, k) => (value === null ? null : [x(k), scales[k](value)]));
    const path = points.filter(Boolean).map((point) => point.map((p) => p.toFixed(1)).join(" ")).join("L");
    const name = trial.place === null ? "none" : trial.place === 0 ? "best" : "";
    const line = svg("path", { class: name, d: `M${path}`, stroke: colorOf(trial) }, root);
    svg("title", {}, line, trial.text);
    return { line, name, points };
  });
  SWEEP.axes.forEach((axis, k) => drawAxis(root, axis, scales[k], k, x(k), top, bottom, lines));
  fade(lines);
}

function drawAxis(root, axis, scale, k, at, top, bottom, lines) {
  svg("line", { class: "axis", x1: at, x2: at, y1: top, y2: bottom }, root);
  const name = svg("text", { class: "name", x: at, y: 18, "text-anchor": "middle" }, root, cut(axis.name, 20));
  svg("title", {}, name, axis.name);
  for (const tick of scale.ticks) {
    svg("line", { class: "axis", x1: at - 4, x2: at, y1: scale(tick), y2: scale(tick) }, root);
    svg("text", { x: at - 7, y: scale(tick) + 4, "text-anchor": "end" }, root, cut(scale.text(tick), 12));
  }
  const mark = svg("rect", { class: "chosen", x: at - 8, width: 16, y: 0, height: 0 }, root);
  const handle = svg("rect", { class: "handle", x: at - 14, width: 28, y: top - 8, height: bottom - top + 16 }, root);
  svg("title", {}, handle, "Drag to show only the trials in a range; click to show all");
  let from = null;
  const show = () => {
    const range = chosen[k] || [0, 0];
    mark.setAttribute("y", range[0]);
    mark.setAttribute("height", range[1] - range[0]);
    fade(lines);
  };
  const where = (event) => event.clientY - root.getBoundingClientRect().top;
  handle.addEventListener("pointerdown", (event) => { from = where(event); handle.setPointerCapture(event.pointerId); });
  handle.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = where(event);
    chosen[k] = Math.abs(to - from) > 3 ? [Math.min(from, to), Math.max(from, to)] : null;
    show();
  });
  handle.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(where(event) - from) <= 3) { chosen[k] = null; show(); }
    from = null;
  });
  show();
}

function fade(lines) {
  for (const { line, name, points } of lines) {
    const inside = chosen.every((range, k) => !range || (points[k] && points[k][1] >= range[0] && points[k][1] <= range[1]));
    line.setAttribute("class", inside ? name : `${name} out`);
  }
}

makeThemeButton();
if (SWEEP.trials.length) {
  document.getElementById("coordinates").hidden = false;
  drawParallel();
}
let waiting;
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnWidth || !SWEEP.trials.length) return;
  drawnWidth = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(() => { chosen.fill(null); drawParallel(); }, 120);
});
