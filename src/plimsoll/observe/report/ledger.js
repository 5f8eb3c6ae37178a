// Time by phase, and the ledger of memory.

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

function buildMemory() {
  const section = byId("memory");
  section.append(element("h2", {}, "Memory: who holds what"));
  const body = element("div"), tools = element("div", { class: "tools" });
  let mine = [], at = runs.findIndex((run) => run.ledger.length), which = 0, view = "";
  if (at < 0) { section.append(element("p", { class: "notice" }, "memory.jsonl is missing or has no rows.")); return; }
  const show = () => {
    mine.forEach(removeChart);
    mine = [];
    body.replaceChildren();
    const tracks = runs[at].ledger;
    if (!tracks.length) { body.append(element("p", { class: "notice" }, "memory.jsonl of this run is missing or has no rows.")); return; }
    const track = tracks[Math.min(which, tracks.length - 1)];
    const part = window_(track, view);
    mine = [hasDevice(track) ? deviceChart(track, part) : null, hostChart(track, part)].filter((made) => made);
    body.append(...mine.map((made) => { made.card.classList.add("stacked"); return made.card; }), summaryTable(track), ranksTable(tracks));
    if (ready) mine.forEach((made) => made.draw());
  };
  const fill = () => {
    const tracks = runs[at].ledger;
    const longest = Math.max(0, ...tracks.map((track) => track.steps.length));
    view = longest > 80 ? "last" : "all";
    const views = picker([["all", "whole run"], ["last", "last steps"], ["first", "first steps"]], (chosen) => { view = chosen; show(); });
    views.value = view;
    tools.replaceChildren(
      several ? element("label", {}, "Run", choose(runNames, at, (chosen) => { at = chosen; which = 0; fill(); show(); })) : "",
      tracks.length > 1 ? element("label", {}, "Process", choose(tracks.map((track) => `rank ${track.rank} · ${track.device} · ${track.process}`), which, (chosen) => { which = chosen; show(); })) : "",
      element("label", {}, "Show", views),
      element("span", { class: "readout" }, [...new Set(tracks.flatMap((track) => track.phases))].sort((a, b) => phaseRank(a) - phaseRank(b))
        .map((phase) => element("span", {}, element("i", { style: `background:${phaseColour(phase)}` }), phase))));
  };
  section.append(tools, body);
  fill();
  show();
}

function choose(names, chosen, onchange) {
  const select = picker(names.map((name, index) => [index, name]), (index) => onchange(Number(index)));
  select.value = String(chosen);
  return select;
}

const hasDevice = (track) => track.values.device_allocated.some(isNumber);

// Range of entries to look at: the phases are readable only when they are few.
function window_(track, view) {
  const count = track.steps.length;
  if (view === "last") return [Math.max(0, count - 40) - 0.5, count - 0.5];
  if (view === "first") return [-0.5, Math.min(count, 40) - 0.5];
  return [-0.5, count - 0.5];
}

const within = (lists, part) => lists.map((list) => list.slice(Math.ceil(part[0]), Math.floor(part[1]) + 1));
const largest = (lists) => lists.reduce((most, list) => list.reduce((best, item) => (isNumber(item) && item > best ? item : best), most), 0);

// Points at the middle of their blocks, and one at each end, so that the first and the last block are whole.
function blocks(values, unit) {
  const scaled = values.map((item) => (isNumber(item) ? item / unit : null));
  return { x: [-0.5, ...values.keys(), values.length - 0.5], y: [scaled[0], ...scaled, scaled[scaled.length - 1]] };
}

// A thing that is held, as an area; one block an entry, so that the height of a block is what was held at that border.
function area(name, values, unit, colour) {
  return { type: "scatter", mode: "lines", name, ...blocks(values, unit), stackgroup: "held",
    line: { shape: "hvh", width: 0.6, color: colour }, fillcolor: translucent(colour, 0.82), hoverinfo: "none", meta: { key: name } };
}

function rule(name, values, unit, colour, more = {}) {
  return { type: "scatter", mode: "lines", name, ...blocks(values, unit),
    line: { shape: "hvh", width: 1.6, color: colour, ...(more.line || {}) }, hoverinfo: "none", meta: { key: name } };
}

// The strip of phases under the areas, on an axis of its own.
function strip(track) {
  const phases = [...new Set(track.phases)];
  return phases.map((phase) => ({ type: "bar", name: `phase ${phase}`, x: track.phases.map((_, at) => at).filter((at) => track.phases[at] === phase), y: track.phases.filter((other) => other === phase).map(() => 1),
    yaxis: "y2", width: 1, marker: { color: phaseColour(phase), line: { width: 0 } }, hoverinfo: "none", meta: { phase } }));
}

function ledgerLayout(track, part, unit, range) {
  const firsts = track.steps.map((step, at) => (at === 0 || track.steps[at - 1] !== step ? at : -1)).filter((at) => at >= part[0] && at <= part[1]);
  const every = Math.ceil(firsts.length / 14) || 1;
  const ticks = firsts.filter((_, index) => index % every === 0);
  const { line } = colours();
  return layout("step, and within it the phases in order", unit === GIB ? "GiB" : "MiB", {
    margin: { l: 50, r: 12, t: 8, b: 38 }, barmode: "overlay", bargap: 0,
    xaxis: { tickvals: ticks, ticktext: ticks.map((at) => String(track.steps[at])), range: part, anchor: "y2", zeroline: false },
    yaxis: { domain: [0.07, 1], range: range ? [0, range] : undefined, rangemode: "tozero" },
    yaxis2: { domain: [0, 0.045], visible: false, range: [0, 1], fixedrange: true },
    shapes: firsts.length <= 60 ? firsts.filter((at) => at > 0).map((at) => ({ type: "line", xref: "x", yref: "paper", x0: at - 0.5, x1: at - 0.5, y0: 0, y1: 1, line: { color: line, width: 1 }, layer: "below" })) : [],
  });
}

function residentNames(track) {
  // Those with a prediction lie at the bottom, so that the line of the prediction can be compared with them.
  const predicted = (name) => track.predicted[name].some(isNumber);
  return Object.keys(track.residents).filter((name) => largest([track.residents[name]]) > 0).sort((a, b) => predicted(b) - predicted(a));
}

function predictedLine(track, names, unit) {
  const known = names.filter((name) => track.predicted[name].some(isNumber));
  if (!known.length) return [];
  const sums = track.steps.map((_, at) => (known.some((name) => isNumber(track.predicted[name][at])) ? known.reduce((sum, name) => sum + (track.predicted[name][at] || 0), 0) : null));
  return [rule("predicted", sums, unit, colours().ink, { line: { dash: "dot", width: 1.4 } })];
}

function deviceChart(track, part) {
  const v = track.values, names = residentNames(track).filter((name) => !track.on_host.includes(name));
  const most = Math.max(largest([v.device_used, v.device_reserved_peak]), 1), total = largest([v.device_total]);
  const unit = most >= GIB ? GIB : MIB;
  const near = total > 0 && most > total * 0.35;
  const held = [...names.map((name) => [name, track.residents[name], residentColour(name, names)]), ["unattributed", v.unattributed, UNATTRIBUTED], ["allocator cache", v.fragmentation, CACHE], ["outside torch", v.device_non_torch, OUTSIDE]];
  const ink = () => colours().ink;
  const peaks = [["peak allocated", v.device_allocated_peak, "#d2364c"], ["peak reserved", v.device_reserved_peak, "#c9a010"]];
  return chart({
    id: "device", title: `Device ${track.device}, rank ${track.rank}`, unit: total ? `capacity ${bytes(total)}, at most ${((100 * most) / total).toFixed(0)} % used` : "", size: "tall", wide: true,
    about: "Areas: what is held at the end of each phase. unattributed: tensors that no part of the program has claimed, activations for example. Allocator cache: reserved by torch, not in a tensor (fragmentation included). Outside torch: contexts, communicators, other processes. Red: the highest within the phase, in tensors; yellow: reserved. Dotted: what the plan predicted for the areas at the bottom.",
    build: () => ({
      traces: [...held.map(([name, values, colour]) => area(name, values, unit, colour)), ...peaks.map(([name, values, colour]) => rule(name, values, unit, colour)), ...predictedLine(track, names, unit),
        ...(near ? [rule("capacity", v.device_total, unit, ink(), { line: { dash: "dash", width: 1.2 } })] : []), ...strip(track)],
      layout: ledgerLayout(track, part, unit, (1.05 * (near ? Math.max(total, most) : largest(within([v.device_used, v.device_reserved_peak], part)))) / unit),
    }),
    readout: (x) => readLedger(track, x, held, [...peaks, ["used", v.device_used, null]]),
  });
}

function hostChart(track, part) {
  const v = track.values, onHost = !hasDevice(track), names = residentNames(track).filter((name) => onHost || track.on_host.includes(name));
  if (!v.host_anonymous.some(isNumber) && !names.length) return null;
  const most = Math.max(largest([v.host_anonymous, v.host_anonymous_peak, v.host_pinned, v.host_shared]), 1), limit = largest([v.host_limit]);
  const unit = most >= GIB ? GIB : MIB, near = limit > 0 && most > limit * 0.35;
  const rest = v.host_anonymous.map((item, at) => (isNumber(item) ? Math.max(0, item - names.reduce((sum, name) => sum + (track.residents[name][at] || 0), 0)) : null));
  const held = [...names.map((name) => [name, track.residents[name], residentColour(name, names)]), [names.length ? "other anonymous" : "anonymous", rest, CACHE]];
  const rules = [["peak anonymous", v.host_anonymous_peak, "#d2364c"], ["pinned", v.host_pinned, "#8b5fd3"], ["shared", v.host_shared, "#17a2b0"]].filter(([, values]) => largest([values]) > 0);
  return chart({
    id: "host", title: `Host memory of rank ${track.rank}`, unit: limit ? `limit ${bytes(limit)}, at most ${((100 * most) / limit).toFixed(0)} % used` : "", size: onHost ? "tall" : "mid", wide: true,
    about: onHost ? "A run on the CPU: what it holds lies in host memory. Other anonymous: Python, libraries, what is left of activations. A cache that was never written to is counted with its size though it takes less. Red: the highest reading within the phase."
      : "Anonymous memory at the end of each phase (this is what counts against the limit) and its highest reading within, with what has a name at the bottom. Pinned: registered for the device, or held by torch's host allocator.",
    build: () => ({
      traces: [...held.map(([name, values, colour]) => area(name, values, unit, colour)), ...rules.map(([name, values, colour]) => rule(name, values, unit, colour)), ...predictedLine(track, names, unit),
        ...(near ? [rule("limit", v.host_limit, unit, colours().ink, { line: { dash: "dash", width: 1.2 } })] : []), ...strip(track)],
      layout: ledgerLayout(track, part, unit, (1.05 * (near ? Math.max(limit, most) : largest(within([v.host_anonymous, v.host_anonymous_peak, v.host_pinned, v.host_shared], part)) || most)) / unit),
    }),
    readout: (x) => readLedger(track, x, held, [...rules, ["anonymous", v.host_anonymous, null]]),
  });
}

function readLedger(track, x, held, others) {
  const at = x === null ? track.steps.length - 1 : Math.max(0, Math.min(track.steps.length - 1, Math.round(x)));
  const phase = track.phases[at];
  const predicted = (name) => (track.predicted[name] && isNumber(track.predicted[name][at]) ? ` (predicted ${bytes(track.predicted[name][at])})` : "");
  return [
    element("span", { class: "at" }, element("i", { style: `background:${phaseColour(phase)}` }), `step ${track.steps[at]}, ${phase}${track.failed[at] ? ", failed" : ""}, ${seconds(track.seconds[at])}`),
    ...held.map(([name, values, colour]) => value(colour, name, bytes(values[at]) + predicted(name))),
    ...others.map(([name, values, colour]) => value(colour, name, bytes(values[at]))),
  ];
}

// Per phase the highest over the run; the bar in a cell is its share of the highest in the table.
function summaryTable(track) {
  const phases = [...track.summary].sort((a, b) => phaseRank(a.phase) - phaseRank(b.phase));
  const names = [...new Set(phases.flatMap((phase) => Object.keys(phase.residents)))];
  const device = hasDevice(track);
  const columns = [
    ...(device ? [["peak allocated", "device_allocated_peak"], ["peak reserved", "device_reserved_peak"], ["used", "device_used"]] : []), ["host peak", "host_anonymous_peak"],
    ...names.map((name) => [name, null, name]),
    ...(device ? [["unattributed", "unattributed"], ["cache", "fragmentation"], ["outside torch", "device_non_torch"]] : []),
    ...(largest([track.values.host_pinned]) >= MIB ? [["pinned", "host_pinned"]] : []),
  ];
  const found = (phase, [, key, name]) => (name ? phase.residents[name] : phase.highest[key]);
  const tops = columns.map((column) => Math.max(...phases.map((phase) => (found(phase, column) || { value: 0 }).value)));
  const rows = phases.map((phase) => element("tr", {},
    element("td", {}, element("span", { class: "swatch", style: `background:${phaseColour(phase.phase)}` }), phase.phase),
    element("td", {}, phase.rows), element("td", {}, seconds(phase.seconds / phase.rows)),
    columns.map((column, at) => {
      const item = found(phase, column);
      if (!item) return element("td", { class: "none" }, "–");
      const predicted = column[2] && phase.predicted[column[2]];
      const leads = item.value === tops[at] && phases.filter((other) => (found(other, column) || { value: 0 }).value >= tops[at] * 0.995).length <= 2;
      const top = leads && !column[2] ? "leading" : null;
      return barCell(tops[at] ? item.value / tops[at] : 0, bytes(item.value), { class: top, title: `step ${item.step}${predicted ? `; predicted ${bytes(predicted)}` : ""}` });
    })));
  const predictions = names.map((name) => [name, phases.map((phase) => phase.predicted[name]).filter(isNumber).pop()]).filter(([, value_]) => isNumber(value_));
  if (predictions.length) {
    const of = new Map(predictions);
    rows.push(element("tr", {}, element("td", { colspan: 3 }, "predicted by the plan"), columns.map((column) => element("td", { class: "none" }, column[2] && of.has(column[2]) ? bytes(of.get(column[2])) : ""))));
  }
  return element("div", { class: "card stacked" },
    element("div", { class: "head" }, element("h3", {}, "Highest of each phase over the run"), element("span", { class: "unit" }, "the step is in the tooltip; a bar compares the phases")),
    element("div", { class: "scroll" }, table(["phase", "times", "mean time", ...columns.map(([title]) => title)], rows)));
}

function ranksTable(tracks) {
  if (tracks.length < 2) return "";
  const keys = [["peak allocated", "device_allocated_peak"], ["peak reserved", "device_reserved_peak"], ["device used", "device_used"], ["host peak", "host_anonymous_peak"]];
  const highest = (track, key) => track.summary.map((phase) => phase.highest[key]).filter((item) => item).reduce((best, item) => (best && best.value >= item.value ? best : item), null);
  const tops = keys.map(([, key]) => Math.max(...tracks.map((track) => (highest(track, key) || { value: 0 }).value)));
  const rows = tracks.map((track) => element("tr", {}, element("td", {}, `rank ${track.rank} · ${track.device} · ${track.process}`), keys.map(([, key], at) => {
    const item = highest(track, key);
    return item ? barCell(tops[at] ? item.value / tops[at] : 0, bytes(item.value), { title: `step ${item.step}` }) : element("td", { class: "none" }, "–");
  })));
  return element("div", { class: "card stacked" }, element("div", { class: "head" }, element("h3", {}, "Highest of each process")), element("div", { class: "scroll" }, table(["process", ...keys.map(([title]) => title)], rows)));
}
