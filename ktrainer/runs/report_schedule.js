"use strict";
// What each stage of a pipeline did when, in one of the traced steps.

const ACTIONS = {
  forward: "var(--kind-0)", backward: "var(--kind-1)", "input gradient": "var(--kind-2)",
  "weight gradient": "var(--kind-4)", others: "var(--kind-5)", waits: "var(--kind-7)",
};
const shownSteps = new Map(); // by run, the number of the step

function drawSchedules() {
  const place = document.getElementById("schedule");
  if (!place) return;
  place.replaceChildren();
  for (const run of RUNS) if (run.schedule && run.schedule.length) drawSchedule(html("figure", "", place), run);
}

function drawSchedule(figure, run) {
  const steps = run.schedule, shown = shownSteps.get(run) ?? steps.length - 1;
  figure.replaceChildren();
  if (RUNS.length > 1) html("h3", "", figure, run.name);
  if (steps.length > 1) {
    const select = html("select");
    steps.forEach((step, k) => { html("option", "", select, step.label).selected = k === shown; });
    select.addEventListener("change", () => { shownSteps.set(run, select.selectedIndex); drawSchedule(figure, run); });
    control(html("div", "toolbar", figure), "Actions of", select);
  }
  const { label, lanes } = steps[shown];
  const kinds = Object.keys(ACTIONS).filter((kind) => lanes.some((lane) => lane.spans.some((span) => span[0] === kind)));
  const keys = html("div", "keys", figure);
  for (const kind of kinds) {
    const key = html("span", "", keys);
    html("span", "swatch", key).style.background = ACTIONS[kind];
    key.append(kind);
  }
  const width = Math.max(figure.clientWidth, 240), bar = 22, row = bar + 6;
  const left = 12 + 6.6 * Math.max(...lanes.map((lane) => lane.name.length)), height = lanes.length * row + 30;
  const end = Math.max(...lanes.flatMap((lane) => lane.spans.map((span) => span[2] + span[3])), 1e-9);
  const x = makeScale(0, end * 1000, left, width - 14, false, (a, b) => linearTicks(a, b, Math.max(3, Math.floor(width / 110))));
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Actions of each stage in ${label}; the table below has their sums as text` }, figure);
  for (const tick of x.ticks) {
    svg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 0, y2: height - 20 }, root);
    svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, root, `${tickText(tick)} ms`);
  }
  lanes.forEach((lane, k) => drawStage(root, lane, k * row + 6, bar, x));
}

function drawStage(root, lane, top, bar, x) {
  svg("text", { class: "name", x: 0, y: top + 15 }, root, lane.name);
  for (const [kind, label, begin, length] of lane.spans) {
    const waits = kind === "waits", at = x(begin * 1000);
    const width = Math.max(x((begin + length) * 1000) - at, 0.5), group = svg("g", {}, root);
    const place = waits ? { y: top + bar - 7, height: 7 } : { y: top, height: bar };
    svg("rect", { x: at, width, ...place, fill: ACTIONS[kind], class: waits ? "waits" : "action" }, group);
    if (!waits && width > 7 * label.length) svg("text", { class: `label ${kind}`, x: at + width / 2, y: top + 13, "text-anchor": "middle" }, group, label);
    svg("title", {}, group, `${label}: ${numberText(length * 1000)} ms`);
  }
}
