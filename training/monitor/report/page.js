// Replaces the pictures by interactive charts; the page is readable without it.
const root = document.documentElement;
root.classList.add("js");
const store = document.getElementById("charts");
const charts = store && (await unpack(document.getElementById("program"))) ? JSON.parse(store.textContent) : [];
const words = JSON.parse(document.getElementById("words")?.textContent ?? "{}"); // in the language of the page

// The chart library is compressed, since it is most of the page. A browser that cannot unpack it shows the pictures.
async function unpack(packed) {
  if (!("DecompressionStream" in window)) return false;
  const bytes = Uint8Array.from(atob(packed.textContent), (char) => char.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script); // runs at once: its checksum is in the policy
  return "vegaEmbed" in window;
}
const UNITS = [["hours", 3600, 7200], ["minutes", 60, 180], ["seconds", 1, -Infinity]];
const ONE = (scale) => (scale.domain ? { domain: scale.domain } : {}); // for curves with a single value
let axis = "step";

function element(name, style, text) {
  const made = document.createElement(name);
  if (style) made.className = style;
  if (text !== undefined) made.textContent = text; // never HTML: names are untrusted
  return made;
}

const tip = document.body.appendChild(element("div", "tip"));
tip.hidden = true;

function rowsOf(chart, unit) {
  const keys = Object.keys(chart.columns);
  const rows = chart.columns[keys[0]].map((_, i) => Object.fromEntries(keys.map((key) => [key, chart.columns[key][i]])));
  if (chart.hover) for (const row of rows) row.x = row[axis] === null ? null : row[axis] / unit;
  return rows;
}

function specOf(chart) {
  const spec = structuredClone(chart.spec);
  spec.width = "container";
  if (!chart.hover) return { ...spec, data: { values: rowsOf(chart, 1) } };
  const last = chart.columns.time.reduce((a, b) => Math.max(a, b), 0);
  const [name, unit] = axis === "time" ? UNITS.find(([, , least]) => last >= least) : [axis === "tokens" ? chart.counted : words.step, 1];
  chart.unit = unit;
  chart.rows = rowsOf(chart, unit).filter((row) => row.x !== null);
  chart.lines = chart.names.map((_, i) => chart.rows.filter((row) => row.series === i && row.y !== null).sort((a, b) => a.x - b.x));
  if (chart.logarithmic) {
    spec.transform.push({ filter: `datum.series > ${chart.beyond}` }); // a logarithmic scale shows all positive values
    spec.transform.push({ calculate: "datum.y > 0 ? datum.y : null", as: "y" }); // and has gaps at the others
  }
  for (const layer of spec.layer) {
    layer.encoding.x.field = "x";
    if (axis !== "step") {
      delete layer.encoding.x.axis.tickMinStep;
      layer.encoding.x.axis.labelExpr = chart.plain_label;
    }
    if (axis === "tokens") layer.encoding.x.axis.format = "~s";
    if (axis === "time") delete layer.encoding.x.axis.format; // an empty format means 1e+2
    layer.encoding.x.axis.title = axis === "time" ? (chart.pauses ? words.since_without_pauses : words.since).replace("{unit}", words[name]) : name;
    if (layer.encoding.y.field && chart.logarithmic) layer.encoding.y.scale = { ...ONE(layer.encoding.y.scale), type: "log", nice: false };
  }
  return { ...spec, data: { values: chart.rows } };
}

// Draws one after the other, and skips all but the last pending request: each click redraws all charts.
function show(chart) {
  const turn = chart.turn = (chart.turn ?? 0) + 1;
  const draw = () => (turn === chart.turn ? drawn(chart) : undefined);
  chart.busy = (chart.busy ?? Promise.resolve()).then(draw, draw);
  return chart.busy;
}

async function drawn(chart) {
  const plot = chart.plot;
  if (!chart.live) plot.style.minHeight = `${plot.clientHeight}px`;
  chart.result?.finalize();
  // Errors only: hidden curves have no extent, which Vega would report.
  const options = { ast: true, renderer: "svg", actions: false, tooltip: { theme: "custom" }, logLevel: 1 };
  chart.result = await vegaEmbed(plot, specOf(chart), options);
  chart.live = true;
  chart.view = chart.result.view;
  plot.style.minHeight = "";
  plot.classList.add("live");
  plot.setAttribute("role", "img"); // Vega labels every chart "Vega visualization"
  plot.setAttribute("aria-label", chart.label);
  if (chart.hover) {
    if (chart.hidden.length) await chart.view.signal("hidden", chart.hidden).runAsync();
    chart.cursor = [plot.appendChild(element("div", "line")), []];
    chart.cursor[0].hidden = true;
  }
}

function nearest(line, x) {
  let low = 0, high = line.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line[middle].x < x) low = middle + 1; else high = middle;
  }
  return low && x - line[low - 1].x < line[low].x - x ? line[low - 1] : line[low];
}

function leave(chart) {
  tip.hidden = true;
  if (!chart.cursor) return;
  chart.cursor[0].hidden = true;
  for (const dot of chart.cursor[1]) dot.remove();
  chart.cursor[1] = [];
}

function shown(value) {
  return value === null ? "-" : Number.isInteger(value) ? value.toLocaleString("en") : String(value);
}

function atStep(step) {
  return words.at_step.replace("{step}", shown(step));
}

function hover(chart, event) {
  leave(chart);
  if (!chart.view || event.buttons) return;
  const view = chart.view, area = chart.plot.querySelector("svg.marks").getBoundingClientRect();
  const left = view.origin()[0] + view.padding().left, top = view.origin()[1] + view.padding().top;
  const px = event.clientX - area.left - left, py = event.clientY - area.top - top;
  const width = view.width(), height = view.height();
  if (px < -2 || px > width + 2 || py < 0 || py > height) return;
  const x = view.scale("x"), y = view.scale("y"), at = x.invert(px);
  const found = [];
  chart.lines.forEach((line, i) => { if (line.length && !chart.hidden.includes(i)) found.push([i, nearest(line, at)]); });
  if (!found.length) return;
  const place = found.map(([, row]) => row).reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
  const box = chart.plot.getBoundingClientRect(), line = chart.cursor[0];
  line.style.cssText = `left:${area.left - box.left + left + x(place.x)}px;top:${area.top - box.top + top}px;height:${height}px`;
  line.hidden = false;
  tip.replaceChildren(element("b", "", atStep(place.step)));
  if (axis !== "step") tip.firstChild.textContent += axis === "time" ? ` · ${place.time.toFixed(1)} s` : ` · ${shown(place.tokens)} ${chart.counted}`;
  for (const [i, row] of found) {
    const entry = tip.appendChild(element("div")), paint = entry.appendChild(element("i"));
    paint.style.background = chart.swatches[i];
    entry.append(element("span", "", chart.names[i] + (row.step === place.step ? "" : ` (${atStep(row.step)})`)), element("span", "", shown(row.y)));
    const dx = x(row.x), dy = y(row.y);
    if (dx < 0 || dx > width || !(dy >= 0 && dy <= height)) continue;
    const dot = chart.plot.appendChild(element("div", "dot"));
    dot.style.cssText = `left:${area.left - box.left + left + dx}px;top:${area.top - box.top + top + dy}px;background:${chart.paints[i]}`;
    chart.cursor[1].push(dot);
  }
  tip.hidden = false;
  const right = event.clientX + 16 + tip.offsetWidth < innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
}

function toggles(buttons, key, those) {
  for (const button of buttons) button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    const off = buttons.filter((b) => b.getAttribute("aria-pressed") !== "true").map((b) => b.dataset[key]);
    for (const chart of those) {
      chart.hidden = chart.names.flatMap((name, i) => (off.includes(name) ? [i, chart.mark - i, chart.beyond - i] : []));
      if ("hidden" in (chart.view?.getState().signals ?? {})) chart.view.signal("hidden", chart.hidden).run();
    }
  });
}

function prepare(chart) {
  const figure = document.getElementById(`chart-${chart.id}`);
  chart.plot = figure.querySelector(".plot");
  chart.label = chart.plot.getAttribute("aria-label");
  chart.hidden = [];
  toggles([...figure.querySelectorAll("[data-series]")], "series", [chart]);
  const log = figure.querySelector(".log");
  log?.addEventListener("click", () => {
    chart.logarithmic = !chart.logarithmic;
    log.setAttribute("aria-pressed", chart.logarithmic);
    show(chart);
  });
  if (!chart.hover) return;
  chart.plot.addEventListener("pointermove", (event) => hover(chart, event));
  for (const end of ["pointerleave", "pointerdown", "wheel"]) chart.plot.addEventListener(end, () => leave(chart), { passive: true });
}

for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", async () => {
  axis = button.dataset.axis;
  for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", other === button);
  for (const chart of charts) if (chart.hover) await show(chart);
});

document.getElementById("theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

let opened = [];
addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; for (const one of opened) one.open = true; });
addEventListener("afterprint", () => { for (const one of opened) one.open = false; });

toggles([...document.querySelectorAll("[data-name]")], "name", charts.filter((chart) => chart.hover));
for (const chart of charts) {
  prepare(chart);
  await show(chart);
}
root.classList.add("ready");
