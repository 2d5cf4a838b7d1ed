import { byId, element, kernelTable, requestJson } from "./common.js";

const PERIOD = 1000; // milliseconds between requests
const KEPT = 120; // samples in a chart
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (value) => `${number(100 * value, 1)} %`;
const milliseconds = (seconds) => (seconds === null ? "–" : `${number(1000 * seconds, 2)} ms`);

const TILES = [
  ["running requests", (stats) => number(stats.requests.running)],
  ["waiting requests", (stats) => number(stats.requests.waiting)],
  ["output tokens/s", (stats) => number(stats.window.output_tokens_per_s)],
  ["prompt tokens/s", (stats) => number(stats.window.prompt_tokens_per_s)],
  ["step time", (stats) => milliseconds(stats.window.step_seconds)],
  ["host time per step", (stats) => milliseconds(stats.window.host_seconds)],
  ["prefix cache hits", (stats) => (stats.window.prefix_hit_rate === null ? "–" : percent(stats.window.prefix_hit_rate))],
  ["KV cache in use", (stats) => percent(stats.kv_cache.usage)],
  ["preemptions in total", (stats) => number(stats.totals.preemptions)],
];
const PAGES = [["held", "c1"], ["pending", "c3"], ["cached", "c2"], ["free", "c4"]];
const CHARTS = [
  ["Requests", [["running", (stats) => stats.requests.running], ["waiting", (stats) => stats.requests.waiting]]],
  ["Tokens per second", [["output", (stats) => stats.window.output_tokens_per_s], ["prompt", (stats) => stats.window.prompt_tokens_per_s]]],
  ["Step, milliseconds", [["step", (stats) => 1000 * (stats.window.step_seconds || 0)], ["host", (stats) => 1000 * (stats.window.host_seconds || 0)]]],
];
const samples = [];

const svg = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

function showTiles(stats) {
  byId("tiles").replaceChildren(...TILES.map(([name, read]) => element("div", { className: "tile" },
    element("div", { className: "name", textContent: name }),
    element("div", { className: "value", textContent: read(stats) }))));
}

function showPages(pages) {
  const total = PAGES.reduce((sum, [name]) => sum + pages[name], 0) || 1;
  byId("bar").replaceChildren(...PAGES.map(([name, color]) => {
    const part = element("div", { className: color });
    part.style.width = `${(100 * pages[name]) / total}%`;
    return part;
  }));
  const text = PAGES.map(([name]) => `${name} ${number(pages[name])}`);
  byId("bar").setAttribute("aria-label", text.join(", "));
  byId("legend").replaceChildren(...PAGES.map(([, color], index) => element("span", {},
    element("span", { className: `swatch ${color}` }), text[index])));
}

function chart(title, series) {
  const width = 400, height = 100;
  const values = series.map(([, read]) => samples.map(read));
  const top = Math.max(1e-9, ...values.flat());
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(svg("line", { x1: 0, x2: width, y1: height - 1, y2: height - 1, class: "grid" }));
  values.forEach((line, index) => {
    const points = line.map((value, at) =>
      `${((KEPT - line.length + at) * width) / (KEPT - 1)},${height - 2 - (value / top) * (height - 6)}`);
    drawing.append(svg("polyline", { points: points.join(" "), class: `s${index + 1}`, fill: "none",
      "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
  });
  const legend = series.map(([name], index) => element("span", {},
    element("span", { className: `swatch c${index + 1}` }), `${name} ${number(values[index].at(-1), 2)}`));
  return element("figure", {}, element("figcaption", {},
    `${title} (highest ${number(top, 2)})`, element("div", { className: "legend" }, ...legend)), drawing);
}

async function update() {
  try {
    const stats = await requestJson("v1/stats");
    if (stats.window) {
      samples.push(stats);
      if (samples.length > KEPT) samples.shift();
      showTiles(stats);
      showPages(stats.kv_cache.pages);
      byId("charts").replaceChildren(...CHARTS.map(([title, series]) => chart(title, series)));
    }
    byId("state").textContent = "live, every second";
    byId("state").classList.remove("error");
  } catch (error) {
    byId("state").textContent = `no answer: ${error.message}`;
    byId("state").classList.add("error");
  }
  setTimeout(update, PERIOD);
}

async function showKernels() {
  try {
    const report = await requestJson("v1/plugins");
    byId("platform").textContent = `on ${report.kernel_plan.platform}`;
    byId("kernelTable").replaceChildren(kernelTable(report.kernel_plan));
  } catch {
    setTimeout(showKernels, 2 * PERIOD); // the server is starting
  }
}

update();
showKernels();
