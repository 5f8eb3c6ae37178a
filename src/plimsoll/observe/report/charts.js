// One small chart: a card with a title, a line of values at the step under the pointer, and a plot.

const charts = [];

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { ink: read("--ink"), soft: read("--soft"), grid: read("--grid"), line: read("--line"), card: read("--card") };
}

function axis(title, more = {}) {
  const { soft, grid, line } = colours();
  return {
    title: { text: title, font: { size: 11, color: soft }, standoff: 6 }, tickfont: { size: 10.5, color: soft }, gridcolor: grid,
    linecolor: line, zerolinecolor: line, automargin: true, fixedrange: false, exponentformat: "power", minexponent: 5, ...more,
  };
}

function layout(xTitle, yTitle, more = {}) {
  return {
    margin: { l: 46, r: 10, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: "system-ui, sans-serif", color: colours().ink }, hovermode: "x", dragmode: "zoom",
    xaxis: axis(xTitle, { showgrid: false, ...(more.xaxis || {}) }), yaxis: axis(yTitle, more.yaxis || {}),
    ...Object.fromEntries(Object.entries(more).filter(([name]) => name !== "xaxis" && name !== "yaxis")),
  };
}

// `build` returns {traces, layout} for the theme and the settings of now; `readout(x)` the values at x, or the last ones.
function chart({ id, title, unit, about, build, readout, size = "", buttons = [], byStep = false, wide = false }) {
  const plot = element("div", { class: `plot ${size}` });
  const line = element("div", { class: "readout" });
  const explanation = element("p", { class: "about", hidden: true }, about || "");
  const info = about ? [toggle("?", "What this shows", (on) => { explanation.hidden = !on; })] : [];
  const card = element("article", { class: `card${wide ? " wide" : ""}`, id: `chart-${id}` },
    element("div", { class: "head" }, element("h3", {}, title), unit ? element("span", { class: "unit" }, unit) : null,
      element("span", { class: "buttons" }, buttons, info,
        wide ? null : toggle("⤢", "Full width", (on) => card.classList.toggle("wide", on)))),
    explanation, line, plot);
  const made = { id, card, plot, line, byStep, drawn: false };
  made.watch = new ResizeObserver(() => { if (made.drawn && plot.clientWidth && Math.abs(plot.clientWidth - plot._fullLayout.width) > 1) Plotly.Plots.resize(plot); });
  made.watch.observe(plot);
  made.read = (x) => readout && line.replaceChildren(...readout(x));
  made.draw = () => {
    const { traces, layout: wanted } = build();
    Plotly.react(plot, traces, wanted, { displayModeBar: false, doubleClick: "reset" });
    if (!made.drawn) listen(made);
    made.drawn = true;
    made.read(null);
  };
  charts.push(made);
  return made;
}

function toggle(text, title, onchange) {
  const button = element("button", { type: "button", title, "aria-label": title, "aria-pressed": "false", onclick: () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    onchange(on);
  } }, text);
  return button;
}

function value(colour, name, text, title = null) {
  return element("span", { title }, colour ? element("i", { style: `background:${colour}${name ? "" : ";margin-right:0"}` }) : null, name, element("b", {}, text));
}

let zooming = false;

function listen(made) {
  const cursor = element("div", { class: "cursor" });
  made.plot.append(cursor);
  made.cursor = cursor;
  made.plot.on("plotly_hover", (event) => pointAt(made, event.points[0].x));
  made.plot.on("plotly_unhover", () => pointAt(made, null));
  if (!made.byStep) return;
  made.plot.on("plotly_relayout", (event) => { // a stretch of steps chosen in one chart is chosen in all
    if (zooming) return;
    const from = event["xaxis.range[0]"], to = event["xaxis.range[1]"];
    if (from === undefined && !event["xaxis.autorange"]) return;
    zooming = true;
    const change = from === undefined ? { "xaxis.autorange": true } : { "xaxis.range": [from, to] };
    Promise.all(charts.filter((other) => other.byStep && other !== made && other.drawn).map((other) => Plotly.relayout(other.plot, change)))
      .finally(() => { zooming = false; });
  });
}

function pointAt(source, x) {
  for (const made of source.byStep ? charts.filter((other) => other.byStep) : [source]) {
    if (!made.drawn) continue;
    made.read(x);
    const full = made.plot._fullLayout;
    const left = x === null ? NaN : full.xaxis.d2p(x);
    if (!(left >= 0 && left <= full.xaxis._length)) { made.cursor.style.display = "none"; continue; }
    made.cursor.style.cssText = `display:block;left:${full.xaxis._offset + left}px;top:${full.yaxis._offset}px;height:${full.yaxis._length}px`;
  }
}

function removeChart(made) {
  charts.splice(charts.indexOf(made), 1);
  made.watch.disconnect();
  if (made.drawn) Plotly.purge(made.plot);
  made.card.remove();
}

// Draw one after the other, so that the page answers meanwhile.
function drawAll(done) {
  const waiting = charts.filter((made) => !made.drawn);
  const next = () => {
    const until = performance.now() + 30;
    while (waiting.length && performance.now() < until) waiting.shift().draw();
    if (waiting.length) setTimeout(next, 0);
    else if (done) done();
  };
  next();
}

const redraw = () => charts.forEach((made) => made.drawn && made.draw());
