// Tables of memory: measured against the plan, who held what, the processes, and the plan itself.

const WIDE_OFF = 0.15; // share of the plan from which a difference is coloured …
const LEAST_OFF = 32 * MIB; // … if it is as many bytes at least: in a small phase a share says nothing

const phaseCell = (name, text = name) => element("td", {}, element("span", { class: "swatch", style: `background:${phaseColour(name)}` }), text);
const none = () => element("td", { class: "none" }, "–");
const sized = (item, attributes = {}) => (isNumber(item) ? element("td", attributes, bytes(item)) : none());
const extreme = (item) => (item && item.value !== 0 ? sized(item.value, { title: `step ${item.step}` }) : none());
const sortedPhases = (track) => [...track.summary].sort((a, b) => byPhase(a.phase, b.phase));

function card(title, unit, ...children) {
  return element("div", { class: "card stacked" }, element("div", { class: "head" }, element("h3", {}, title), unit ? element("span", { class: "unit" }, unit) : null), ...children);
}

function comparedTables(track) {
  return [hasDevice(track) ? deviceTable(track) : "", hostTable(track)];
}

// Measured, where, planned, difference. The first is a bar of `whole`, so that one sees how near the end it was.
function comparedCells(found, whole, planned) {
  if (!found) return [none(), none(), ...(planned ? [none(), none()] : [])];
  const cells = [whole ? barCell(found.value / whole, bytes(found.value)) : sized(found.value), element("td", {}, found.step)];
  if (!planned) return cells;
  if (!isNumber(found.planned)) return [...cells, none(), none()];
  const off = found.value - found.planned, wide = Math.abs(off) > Math.max(LEAST_OFF, WIDE_OFF * found.planned);
  const text = found.planned ? `${off >= 0 ? "+" : "−"}${((100 * Math.abs(off)) / found.planned).toFixed(1)} %` : "–";
  return [...cells, sized(found.planned), element("td", { class: wide ? (off > 0 ? "over" : "under") : null, title: `${bytes(Math.abs(off))} ${off >= 0 ? "more" : "less"} than planned` }, text)];
}

const plannedTitles = (planned) => (planned ? ["planned for it", "difference"] : []);
const comparedCard = (place, planned, titles, rows) => card(`${place}: highest of each phase${planned ? ", and the plan" : ""}`, planned ? "coloured: more than 15 % off, red above the plan" : "", element("div", { class: "scroll" }, table(titles, rows)));

function deviceTable(track) {
  const phases = sortedPhases(track), planned = phases.some((phase) => phase.device && isNumber(phase.device.planned));
  const total = largest([column(track, "device_total")]);
  const moved = [["evicted before", "evicted"], ["admitted before", "admitted"]].filter(([, key]) => phases.some((phase) => phase.highest[key] && phase.highest[key].value));
  const rows = phases.map((phase) => {
    const high = phase.highest, reserved = high.device_reserved_peak, allocated = high.device_allocated_peak, border = high.seconds_border;
    return element("tr", {}, phaseCell(phase.phase), comparedCells(phase.device, total, planned),
      phase.device && total ? sized(total - phase.device.value, { class: phase.device.value > 0.95 * total ? "over" : null }) : none(),
      extreme(high.device_highest), extreme(high.fragmentation),
      reserved && allocated && allocated.value ? element("td", { title: `${bytes(reserved.value)} reserved, ${bytes(allocated.value)} in tensors` }, (reserved.value / allocated.value).toFixed(2)) : none(),
      moved.map(([, key]) => extreme(high[key])), moved.length ? (border && border.value >= 1e-3 ? element("td", { title: `step ${border.step}` }, seconds(border.value)) : none()) : []);
  });
  const titles = ["phase", "highest", "at step", ...plannedTitles(planned), "headroom", "highest with cache", "fragmen\u00adtation", "reserved ÷ allocated", ...moved.map(([title]) => title), ...(moved.length ? ["moving, longest"] : [])];
  return comparedCard("Device", planned, titles, rows);
}

function hostTable(track) {
  const phases = sortedPhases(track), planned = phases.some((phase) => phase.host && isNumber(phase.host.planned));
  if (!phases.some((phase) => phase.host)) return "";
  const most = Math.max(...phases.map((phase) => (phase.host ? phase.host.value : 0)), 1), pinned = largest([column(track, "host_pinned")]) >= MIB;
  const rows = phases.map((phase) => element("tr", {}, phaseCell(phase.phase), comparedCells(phase.host, most, planned), extreme(phase.highest.host_anonymous_peak), pinned ? extreme(phase.highest.host_pinned) : [], extreme(phase.host_left)));
  const titles = ["phase", "highest over the start", "at step", ...plannedTitles(planned), "highest", ...(pinned ? ["pinned"] : []), "left on the node, least"];
  return comparedCard("Host", planned, titles, rows);
}

// Per phase the highest over the run; the bar in a cell is its share of the highest in the table.
function summaryTable(track) {
  const phases = sortedPhases(track);
  const names = [...new Set(phases.flatMap((phase) => Object.keys(phase.residents)))];
  const device = hasDevice(track);
  const columns = [
    ...(device ? [["peak allocated", "device_allocated_peak"], ["peak reserved", "device_reserved_peak"], ["used", "device_used"]] : []), ["host peak", "host_anonymous_peak"],
    ...names.map((name) => [name, null, name]),
    ...(device ? [["unattributed", "unattributed"], ["outside torch", "device_non_torch"]] : []),
    ...(largest([column(track, "host_pinned")]) >= MIB ? [["pinned", "host_pinned"]] : []),
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
    element("div", { class: "head" }, element("h3", {}, "Who held what: the most at the end of each phase"), element("span", { class: "unit" }, "the step is in the tooltip; a bar compares the phases")),
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

// The plan as it is in plan.json: a row a consumer, a column a phase, for the rank that holds most.
function planCards(plan) {
  if (!plan) return [];
  const slots = [...new Set(plan.phases.map((phase) => phase.slot))];
  const state = `${plan.fits ? "it fits" : "it does not fit"}; ${plan.calibrated ? "activations as measured at the start of the run" : "activations by formula"}`;
  const blocked = plan.refusals.map((refusal) => `${refusal.slot}, ${refusal.phase}, rank ${refusal.rank}: needs ${bytes(refusal.need_bytes)}, has ${bytes(refusal.have_bytes)}`);
  return [
    ...slots.map((slot) => card(slots.length > 1 ? `The plan of slot ${slot}` : "The plan", `${plan.choices.device === "cpu" ? "host bytes, for it is a run on the CPU, " : "device bytes "}of the fullest rank; ${state}`,
      blocked.map((text) => element("p", { class: "notice" }, text)), element("div", { class: "scroll" }, planTable(plan.phases.filter((phase) => phase.slot === slot))))),
    card("The plan: host, moves, choices", "", planFacts(plan), consumersTable(plan.host), plan.notes.length ? element("ul", { class: "notes" }, plan.notes.map((note) => element("li", {}, note))) : ""),
  ];
}

function planTable(phases) {
  const most = Math.max(...phases.map((phase) => phase.device_bytes), 1);
  const names = (key) => [...new Set(phases.flatMap((phase) => Object.keys(phase[key])))].filter((name) => phases.some((phase) => phase[key][name]));
  const held = names("residents"), parts = names("workspace");
  const line = (title, cells, kind = null, colour = null) => element("tr", { class: kind }, element("td", {}, colour ? element("span", { class: "swatch", style: `background:${colour}` }) : null, title), cells);
  const group = (title) => element("tr", { class: "group" }, element("td", { colspan: phases.length + 1 }, title));
  const resident = (phase, name) => (phase.evicted.includes(name) ? element("td", { class: "away", title: "the plan moves it off the device, or drops it, for this phase" }, "away") : phase.residents[name] ? sized(phase.residents[name]) : none());
  const rows = [
    group("all through the phase"), ...held.map((name) => line(name, phases.map((phase) => resident(phase, name)), null, planColour(name, held))),
    group("comes and goes within it"), ...parts.map((name) => line(name, phases.map((phase) => (phase.workspace[name] ? sized(phase.workspace[name]) : none())))),
    ...(parts.length === 1 ? [] : [line("together", phases.map((phase) => (phase.workspace_bytes ? sized(phase.workspace_bytes) : none())))]),
    line("highest", phases.map((phase) => barCell(phase.device_bytes / (phase.capacity_bytes || most), bytes(phase.device_bytes), { class: phase.device_bytes === most ? "leading" : null })), "total"),
    line("capacity", phases.map((phase) => sized(phase.capacity_bytes))),
    line("headroom", phases.map((phase) => sized(phase.headroom_bytes, { class: phase.headroom_bytes < 0 ? "over" : null }))),
    line("host memory of the rank", phases.map((phase) => sized(phase.host_bytes))),
  ];
  const heads = phases.map((phase) => element("th", {}, element("span", { class: "swatch", style: `background:${phaseColour(phase.phase)}` }), phase.phase.replace("/", "/\u200b")));
  return element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "bytes"), heads)), element("tbody", {}, rows));
}

const planColour = (name, names) => (/^(cuda_context|communicator)/.test(name) ? OUTSIDE : residentColour(name, names));

function planFacts(plan) {
  const { host, choices } = plan, spent = plan.seconds_per_step;
  const range = (list) => (list.length ? (Math.min(...list) === Math.max(...list) ? bytes(list[0]) : `${bytes(Math.min(...list))} – ${bytes(Math.max(...list))}`) : "–");
  const cost = (name) => (isNumber(spent[name]) ? `, about ${seconds(spent[name])}` : "");
  const leaf = (name, text) => element("span", { class: "leaf" }, element("b", {}, name), text);
  const plain = (name, item) => (isNumber(item) ? (/bytes/.test(name) ? bytes(item) : item.toLocaleString("en-US")) : String(item));
  return [
    element("div", { class: "leaves" },
      leaf(`host memory of a node, ${host.node_peak_bytes.length} node${host.node_peak_bytes.length === 1 ? "" : "s"}`, `${range(host.node_peak_bytes)}${host.capacity_bytes ? ` of ${bytes(host.capacity_bytes)}` : ""}`),
      leaf(`of a rank, ${host.rank_peak_bytes.length} rank${host.rank_peak_bytes.length === 1 ? "" : "s"}`, range(host.rank_peak_bytes)), leaf("page cache counted on", range(host.file_cache_bytes)),
      leaf("moved over PCIe a step", bytes(plan.moved_bytes_per_step) + cost("moved")), leaf("sent to other ranks a step", bytes(plan.wire_bytes_per_step) + cost("wire")), isNumber(spent.compute) ? leaf("arithmetic a step", `about ${seconds(spent.compute)}`) : null),
    element("div", { class: "leaves" }, Object.entries({ ...choices, ...plan.model }).filter(([, item]) => typeof item !== "object").map(([name, item]) => leaf(name, plain(name, item)))),
  ];
}

function consumersTable(host) {
  const found = Object.entries(host.consumers).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
  if (!found.length) return "";
  const rows = found.map(([name, size]) => element("tr", {}, element("td", {}, name), barCell(size / found[0][1], bytes(size))));
  return element("div", { class: "scroll narrow" }, table(["host memory of the fullest rank at its highest", "bytes"], rows));
}
