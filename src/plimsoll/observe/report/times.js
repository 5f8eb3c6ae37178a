// Time by phase.

function buildTimes() {
  const section = byId("times");
  section.append(element("h2", {}, "Time per phase"));
  const body = element("div");
  let mine = [];
  const show = (at) => {
    mine.forEach(removeChart);
    mine = [];
    body.replaceChildren();
    const run = runs[at];
    if (!run.times.steps.length) { body.append(element("p", { class: "notice" }, "metrics.jsonl has no times yet.")); return; }
    const made = timesChart(run);
    mine.push(made);
    body.append(element("div", { class: "columns" }, made.card, timesTable(run)));
    if (ready) made.draw();
  };
  if (several) section.append(element("div", { class: "tools" }, element("label", {}, "Run", picker(runNames.map((name, at) => [at, name]), (at) => show(Number(at))))));
  section.append(body);
  show(0);
}

function timesChart(run) {
  const { steps, columns } = run.times;
  const names = Object.keys(columns).sort((a, b) => phaseRank(a) - phaseRank(b));
  const phases = names.filter((name) => !PARTS_OF_ROLLOUT.includes(name));
  const parts = names.filter((name) => PARTS_OF_ROLLOUT.includes(name));
  const sums = steps.map((_, at) => phases.reduce((sum, name) => sum + (columns[name][at] || 0), 0));
  const limit = usualHeight(sums), longer = sums.filter((sum) => sum > limit).length;
  let cut = longer > 0;
  const button = longer ? toggle("full height", "Show the longest steps whole", (on) => { cut = !on; made.draw(); }) : null;
  const made = chart({
    id: "times", title: "Seconds per step", unit: longer ? `${longer} longer than ${seconds(limit)}, cut off` : "", size: "mid", byStep: true, wide: true, buttons: [button],
    about: "Wall time of each phase, stacked. Dotted: generation and scoring, which are parts of rollout and may overlap.",
    build: () => ({
      traces: [
        ...phases.map((name) => ({ type: "bar", x: steps, y: columns[name], name, hoverinfo: "none", marker: { color: phaseColour(name), line: { width: 0 } }, meta: { key: `time/${name}`, run: runs.indexOf(run) } })),
        ...parts.map((name) => ({ type: "scatter", mode: "lines", x: steps, y: columns[name], name, hoverinfo: "none", line: { color: phaseColour(name), width: 1.6, dash: "dot" }, meta: { key: `time/${name}`, run: runs.indexOf(run) } })),
      ],
      layout: layout("step", "seconds", { barmode: "stack", bargap: steps.length > 60 ? 0 : 0.15, yaxis: cut ? { range: [0, limit] } : { rangemode: "tozero" } }),
    }),
    readout: (x) => {
      const at = x === null ? steps.length - 1 : nearest(steps, x);
      return [element("span", { class: "at" }, `step ${steps[at]}`), ...names.filter((name) => isNumber(columns[name][at])).map((name) => value(phaseColour(name), name, seconds(columns[name][at])))];
    },
  });
  return made;
}

// A height above nearly all of the values, for the few that are far higher (compilation in a first step) would flatten the rest.
function usualHeight(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted[sorted.length - 1], usual = sorted[Math.floor(0.97 * (sorted.length - 1))];
  return sorted.length >= 10 && most > 3 * usual ? 1.25 * usual : most;
}

function timesTable(run) {
  const totals = [...run.times.totals].sort((a, b) => phaseRank(a.name) - phaseRank(b.name));
  const sum = totals.filter((total) => !PARTS_OF_ROLLOUT.includes(total.name)).reduce((all, total) => all + total.seconds, 0);
  const rows = totals.map((total) => {
    const part = PARTS_OF_ROLLOUT.includes(total.name);
    return element("tr", {},
      element("td", {}, element("span", { class: "swatch", style: `background:${phaseColour(total.name)}` }), part ? `rollout: ${total.name}` : total.name),
      element("td", {}, seconds(total.seconds)), barCell(total.seconds / sum, `${((100 * total.seconds) / sum).toFixed(1)} %`),
      element("td", {}, seconds(total.seconds / total.rows)), element("td", { title: `step ${total.highest_step}` }, seconds(total.highest)), element("td", {}, total.rows));
  });
  return element("div", { class: "card" }, element("div", { class: "head" }, element("h3", {}, "Over the whole run")),
    element("div", { class: "scroll" }, table(["phase", "total", "share", "mean", "longest", "times"], rows)));
}

// Titles may break after an underscore.
const table = (titles, rows) => element("table", {}, element("thead", {}, element("tr", {}, titles.map((title) => element("th", {}, title.replace(/_/g, "_\u200b"))))), element("tbody", {}, rows));

function barCell(share, text, attributes = {}) {
  const width = Math.max(0, Math.min(100, 100 * share)).toFixed(1);
  return element("td", { ...attributes, style: `background:linear-gradient(90deg, var(--bar) ${width}%, transparent ${width}%)` }, text);
}
