// The ledger of memory: a timeline of what is held, on the device and on the host, with the plan beside it.

function buildMemory() {
  const section = byId("memory");
  section.append(element("h2", {}, "Memory: who holds what"));
  const body = element("div"), tools = element("div", { class: "tools" });
  let mine = [], at = runs.findIndex((run) => run.ledger.length || run.plan), which = 0, view = "", phase = "";
  if (at < 0) { section.append(element("p", { class: "notice" }, "memory.jsonl is missing or has no rows.")); return; }
  const show = () => {
    mine.forEach(removeChart);
    mine = [];
    body.replaceChildren();
    const { ledger: tracks, plan } = runs[at];
    if (!tracks.length) { body.append(element("p", { class: "notice" }, "memory.jsonl of this run is missing or has no rows."), ...planCards(plan)); return; }
    const whole = tracks[Math.min(which, tracks.length - 1)], track = phase ? ofPhase(whole, phase) : whole;
    const part = window_(track, view);
    mine = [hasDevice(whole) ? deviceChart(track, part) : null, hostChart(track, part)].filter((made) => made);
    body.append(...mine.map((made) => { made.card.classList.add("stacked"); return made.card; }), ...comparedTables(whole), summaryTable(whole), ranksTable(tracks), ...planCards(plan));
    if (ready) mine.forEach((made) => made.draw());
  };
  const fill = () => {
    const tracks = runs[at].ledger, phases = [...new Set(tracks.flatMap((track) => track.phases))].sort(byPhase);
    const longest = Math.max(0, ...tracks.map((track) => track.steps.length));
    view = longest > 80 ? "last" : "all";
    phase = "";
    const views = picker([["all", "whole run"], ["last", "last steps"], ["first", "first steps"]], (chosen) => { view = chosen; show(); });
    views.value = view;
    tools.replaceChildren(
      several ? element("label", {}, "Run", choose(runNames, at, (chosen) => { at = chosen; which = 0; fill(); show(); })) : "",
      tracks.length > 1 ? element("label", {}, "Process", choose(tracks.map((track) => `rank ${track.rank} · ${track.device} · ${track.process}`), which, (chosen) => { which = chosen; show(); })) : "",
      element("label", {}, "Show", views),
      phases.length > 1 ? element("label", {}, "Phase", picker([["", "all"], ...phases.map((name) => [name, name])], (chosen) => { phase = chosen; view = chosen ? "all" : view; views.value = view; show(); })) : "",
      element("span", { class: "readout" }, phases.map((name) => element("span", {}, element("i", { style: `background:${phaseColour(name)}` }), name))));
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

// A column that says nothing is not in the page.
const column = (track, key) => track.values[key] || track.levels[key] || track.steps.map(() => null);
const hasDevice = (track) => column(track, "device_allocated").some(isNumber);

// The same border of every step: what grows there is easy to see.
function ofPhase(track, phase) {
  const kept = (list) => list.filter((_, at) => track.phases[at] === phase);
  const each = (lists) => Object.fromEntries(Object.entries(lists).map(([name, list]) => [name, kept(list)]));
  const lists = Object.fromEntries(["steps", "failed", "seconds", "seconds_border", "phases"].map((name) => [name, kept(track[name])]));
  return { ...track, ...lists, values: each(track.values), levels: each(track.levels), residents: each(track.residents), predicted: each(track.predicted) };
}

// Range of entries to look at: the phases are readable only when they are few.
function window_(track, view) {
  const count = track.steps.length;
  if (view === "last") return [Math.max(0, count - 40) - 0.5, count - 0.5];
  if (view === "first") return [-0.5, Math.min(count, 40) - 0.5];
  return [-0.5, count - 0.5];
}

const within = (lists, part) => lists.map((list) => list.slice(Math.ceil(part[0]), Math.floor(part[1]) + 1));
const largest = (lists) => lists.reduce((most, list) => list.reduce((best, item) => (isNumber(item) && item > best ? item : best), most), 0);
const sumsOf = (track, names) => track.steps.map((_, at) => names.reduce((sum, name) => sum + (track.residents[name][at] || 0), 0));

// Points at the middle of their blocks, and one at each end, so that the first and the last block are whole.
function blocks(values, unit) {
  const scaled = values.map((item) => (isNumber(item) ? item / unit : null));
  return { x: [-0.5, ...values.keys(), values.length - 0.5], y: [scaled[0], ...scaled, scaled[scaled.length - 1]] };
}

// A thing that is held, as an area; one block an entry, so that the height of a block is what was held at that border.
function area({ name, values, colour }, unit) {
  return { type: "scatter", mode: "lines", name, ...blocks(values.map((item) => (isNumber(item) ? Math.max(0, item) : item)), unit), stackgroup: "held",
    line: { shape: "hvh", width: 0.6, color: colour }, fillcolor: translucent(colour, 0.82), hoverinfo: "none", meta: { key: name } };
}

function rule({ name, values, colour, dash = "solid", width = 1.8 }, unit) {
  return { type: "scatter", mode: "lines", name, ...blocks(values, unit), line: { shape: "hvh", width, color: colour, dash }, hoverinfo: "none", meta: { key: name } };
}

// Behind the areas: what comes and goes within a phase.
const tint = (item, unit) => ({ ...rule(item, unit), name: `${item.name}, tint`, line: { shape: "hvh", width: 0 }, fill: "tozeroy", fillcolor: translucent(item.colour, 0.08) });

// The strip of phases under the areas, on an axis of its own.
function strip(track) {
  const phases = [...new Set(track.phases)];
  return phases.map((phase) => ({ type: "bar", name: `phase ${phase}`, x: track.phases.map((_, at) => at).filter((at) => track.phases[at] === phase), y: track.phases.filter((other) => other === phase).map(() => 1),
    yaxis: "y2", width: 1, marker: { color: phaseColour(phase), line: { width: 0 } }, hoverinfo: "none", meta: { phase } }));
}

function ledgerLayout(track, part, unit, most) {
  const firsts = track.steps.map((step, at) => (at === 0 || track.steps[at - 1] !== step ? at : -1)).filter((at) => at >= part[0] && at <= part[1]);
  const every = Math.ceil(firsts.length / 14) || 1;
  const ticks = firsts.filter((_, index) => index % every === 0);
  const { line } = colours(), band = { type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, line: { width: 0 }, layer: "above" };
  const borders = firsts.length <= 60 ? firsts.filter((at) => at > 0).map((at) => ({ type: "line", xref: "x", yref: "paper", x0: at - 0.5, x1: at - 0.5, y0: 0, y1: 1, line: { color: line, width: 1 }, layer: "below" })) : [];
  const failed = [...track.failed.keys()].filter((at) => track.failed[at]).map((at) => ({ ...band, x0: at - 0.5, x1: at + 0.5, fillcolor: translucent(PEAK, 0.25) }));
  return layout(new Set(track.phases).size > 1 ? "step, and within it the phases in order" : `step, ${track.phases[0]} only`, unit === GIB ? "GiB" : "MiB", {
    margin: { l: 50, r: 12, t: 8, b: 38 }, barmode: "overlay", bargap: 0,
    xaxis: { tickvals: ticks, ticktext: ticks.map((at) => String(track.steps[at])), range: part, anchor: "y2", zeroline: false },
    yaxis: { domain: [0.07, 1], range: [0, (1.05 * most) / unit], rangemode: "tozero" },
    yaxis2: { domain: [0, 0.045], visible: false, range: [0, 1], fixedrange: true },
    shapes: [...borders, ...failed],
  });
}

function residentNames(track) {
  // Those with a prediction lie at the bottom, so that the line of the prediction can be compared with them.
  const predicted = (name) => track.predicted[name].some(isNumber);
  return Object.keys(track.residents).filter((name) => largest([track.residents[name]]) > 0).sort((a, b) => predicted(b) - predicted(a));
}

const residents = (track, names) => names.map((name) => ({ name, values: track.residents[name], colour: residentColour(name, names) }));

// The plan's line is the height of the whole phase; a run without one has predictions of single residents at most.
function planLines(track, key, names) {
  const planned = column(track, key), style = { colour: colours().ink, width: 2 };
  if (planned.some(isNumber)) return [{ ...style, name: "plan", values: planned, dash: "dash" }];
  const known = names.filter((name) => track.predicted[name].some(isNumber));
  if (!known.length) return [];
  const sums = track.steps.map((_, at) => (known.some((name) => isNumber(track.predicted[name][at])) ? known.reduce((sum, name) => sum + (track.predicted[name][at] || 0), 0) : null));
  return [{ ...style, name: "predicted", values: sums, dash: "dot", width: 1.4 }];
}

const some = (part) => largest([part.values]) > 0;

// A ceiling far above everything would make the rest flat; its number is in the title then.
function timeline({ track, part, id, title, ceiling, ceilingName, held, lines, others, about, size }) {
  const stack = track.steps.map((_, at) => held.reduce((sum, { values }) => sum + Math.max(0, values[at] || 0), 0));
  const heights = [stack, ...lines.map(({ values }) => values)], most = Math.max(largest(heights), 1), limit = largest([ceiling]);
  const unit = most >= GIB ? GIB : MIB, near = limit > 0 && most > limit * 0.35;
  const top = near ? [{ name: ceilingName, values: ceiling, colour: colours().soft, dash: "dot", width: 2 }] : [];
  const ink = () => ({ plan: colours().ink, predicted: colours().ink, [ceilingName]: colours().soft });
  const lit = (item) => ({ ...item, colour: ink()[item.name] || item.colour }); // of the theme as it is when drawn
  return chart({
    id, title, unit: limit ? `${ceilingName} ${bytes(limit)}, at most ${((100 * most) / limit).toFixed(0)} % of it` : "", size, wide: true, about,
    build: () => ({
      traces: [...lines.filter((item) => item.tinted).map((item) => tint(item, unit)), ...held.map((item) => area(item, unit)), ...[...lines, ...top].map((item) => rule(lit(item), unit)), ...strip(track)],
      layout: ledgerLayout(track, part, unit, near ? Math.max(limit, most) : largest(within(heights, part)) || most),
    }),
    readout: (x) => readLedger(track, x, held, [...lines, ...top].map(lit), others),
  });
}

function deviceChart(track, part) {
  const names = residentNames(track).filter((name) => !track.on_host.includes(name));
  const inEngine = names.filter((name) => track.in_engine.includes(name)), ours = names.filter((name) => !inEngine.includes(name));
  const coloured = residents(track, names), known = sumsOf(track, inEngine);
  const rest = column(track, "device_engine").map((item, at) => (isNumber(item) ? Math.max(0, item - known[at]) : null));
  const held = [
    ...coloured.filter(({ name }) => ours.includes(name)), { name: "unattributed", values: column(track, "unattributed"), colour: UNATTRIBUTED },
    ...coloured.filter(({ name }) => inEngine.includes(name)), { name: inEngine.length ? "other in the engine" : "engine", values: rest, colour: ENGINE },
    { name: "outside torch", values: column(track, "device_non_torch"), colour: OUTSIDE }, { name: "allocator cache", values: column(track, "fragmentation"), colour: CACHE },
  ].filter((item) => item.colour !== ENGINE || some(item));
  return timeline({
    track, part, id: "device", title: `Device ${track.device}, rank ${track.rank}`, ceilingName: "capacity", ceiling: column(track, "device_total"), held, size: "tall",
    lines: [{ name: "highest with cache", values: column(track, "device_highest"), colour: RESERVED, width: 1.4 }, { name: "highest", values: column(track, "device_peak"), colour: PEAK, tinted: true }, ...planLines(track, "planned_device", ours)],
    others: [["used", column(track, "device_used")], ["evicted before", column(track, "evicted")], ["admitted before", column(track, "admitted")], ["grown outside torch", column(track, "non_torch_growth")]],
    about: "Areas: what is held at the end of each phase. unattributed: tensors that no part of the program has claimed. Outside torch: contexts, communicators, other processes. Allocator cache, on top: reserved by torch and not in a tensor (fragmentation included). Red: the highest within the phase without that cache, which is what the plan's dashed line foretells: red above dashed needed more than planned. Yellow: the highest with the cache. A reddish block is a phase that ended with an error.",
  });
}

function hostChart(track, part) {
  const onHost = !hasDevice(track), names = residentNames(track).filter((name) => onHost || track.on_host.includes(name));
  const level = column(track, "host_anonymous"), pinned = column(track, "host_pinned"), shared = column(track, "host_shared");
  if (!level.some(isNumber) && !names.length) return null;
  // What the driver has pinned counts as shared memory, what we have registered as anonymous.
  const named = sumsOf(track, names), unnamed = pinned.map((item, at) => Math.max(0, (item || 0) - named[at]));
  const apart = unnamed.map((item, at) => Math.min(item, shared[at] || 0)), within_ = unnamed.map((item, at) => item - apart[at]);
  const rest = level.map((item, at) => (isNumber(item) ? Math.max(0, item - named[at] - within_[at]) : null));
  const held = [...residents(track, names), { name: names.length ? "other pinned" : "pinned", values: within_, colour: PINNED },
    { name: names.length ? "other anonymous" : "anonymous", values: rest, colour: CACHE }, { name: "pinned by the driver", values: apart, colour: DRIVER }].filter((item) => item.colour === CACHE || some(item));
  return timeline({
    track, part, id: "host", title: `Host memory of rank ${track.rank}`, ceilingName: "limit", ceiling: column(track, "host_limit"), held, size: onHost ? "tall" : "mid",
    lines: [{ name: "highest anonymous", values: column(track, "host_anonymous_peak"), colour: PEAK, tinted: true }, ...planLines(track, "host_planned", names)],
    others: [["shared", shared], ["pinned in all", pinned]],
    about: onHost ? "A run on the CPU: what it holds lies in host memory. Other anonymous: Python, libraries, what is left of activations. A cache that was never written to is counted with its size though it takes less. Red: the highest reading within the phase. Dashed: the plan, on top of what the process started with."
      : "Areas: anonymous memory at the end of each phase, split into residents that live on the host, what else is pinned for the device, and the rest (Python, libraries); on top what the driver has pinned by itself. Red: the highest reading of anonymous memory within the phase. Dashed: the plan, on top of what the process started with. The limit is that of the whole node or container.",
  });
}

function readLedger(track, x, held, lines, others) {
  const at = x === null ? track.steps.length - 1 : Math.max(0, Math.min(track.steps.length - 1, Math.round(x)));
  const phase = track.phases[at], border = track.seconds_border[at];
  const predicted = (name) => (track.predicted[name] && isNumber(track.predicted[name][at]) ? ` (predicted ${bytes(track.predicted[name][at])})` : "");
  const stroke = ({ colour, dash = "solid" }) => element("i", { class: "line", style: `border-top-style:${{ dash: "dashed", dot: "dotted" }[dash] || "solid"};border-top-color:${colour}` });
  return [
    element("span", { class: "at" }, element("i", { style: `background:${phaseColour(phase)}` }), `step ${track.steps[at]}, ${phase}${track.failed[at] ? ", failed" : ""}, ${seconds(track.seconds[at])}${border >= 1e-3 ? ` and ${seconds(border)} of moving before it` : ""}`),
    ...held.map(({ name, values, colour }) => value(colour, name, bytes(values[at]) + predicted(name))),
    ...lines.filter((item) => isNumber(item.values[at])).map((item) => element("span", {}, stroke(item), item.name, element("b", {}, bytes(item.values[at])))),
    ...others.filter(([, values]) => values[at]).map(([name, values]) => value(null, name, bytes(values[at]))),
  ];
}
