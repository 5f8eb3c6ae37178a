"use strict";
// Small things that everything else uses. Text of a run goes into the page by textContent only, never as HTML.

const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs;
const several = runs.length > 1;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

const byId = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number";

function shown(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: size >= 10000 ? 0 : 1 });
  return String(Number(value.toPrecision(4)));
}

const MIB = 1024 ** 2;
const GIB = 1024 ** 3;

function bytes(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= GIB) return `${(value / GIB).toFixed(size >= 100 * GIB ? 0 : 2)} GiB`;
  if (size >= MIB) return `${(value / MIB).toFixed(size >= 100 * MIB ? 0 : 1)} MiB`;
  if (size === 0) return "0";
  return size < 1024 ? `${value} B` : `${(value / 1024).toFixed(0)} KiB`;
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 100) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${shown(Number((value * 1000).toPrecision(3)))} ms`;
}

function when(secondsSince1970) {
  if (!isNumber(secondsSince1970)) return "–";
  const date = new Date(secondsSince1970 * 1000);
  const pad = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

// Colours: the same thing has the same colour everywhere. They are readable on both backgrounds.
const RUN_COLOURS = ["#2f7de1", "#e8710a", "#1a9e5c", "#b5459c", "#c9a010", "#5b6ee1", "#d2364c", "#17a2b0", "#8a6d3b", "#7b8794"];
const SERIES_COLOURS = ["#2f7de1", "#e8710a", "#1a9e5c", "#b5459c", "#c9a010", "#17a2b0", "#d2364c", "#7b8794"];
const PHASE_COLOURS = {
  load: "#8d99a8", rollout: "#2f7de1", logprob: "#8b5fd3", reference: "#c08be0", update: "#e8710a", sync: "#1a9e5c", eval: "#17a2b0",
  save: "#a0703a", export: "#c9a010", generate: "#86b6f2", reward: "#d94f8a",
};
const OTHER_PHASE_COLOURS = ["#5b6ee1", "#6b8e23", "#b5459c", "#d2364c", "#3f8f8a", "#b9770e"];
const PHASE_ORDER = Object.keys(PHASE_COLOURS);
const RESIDENT_COLOURS = {
  actor_parameters: "#2459a8", actor_gradients: "#e8710a", optimizer_state: "#1a9e5c", reference_parameters: "#7fa8de",
  kv_cache: "#8b5fd3", rollout_parameters: "#17a2b0", engine_buffers: "#c08be0", reference_arena: "#7fa8de", host_arena: "#3f8f8a", staging_ring: "#6b8e23",
};
const OTHER_COLOURS = ["#c9a010", "#b5459c", "#6b8e23", "#d2364c", "#5b6ee1", "#a0703a"];
const UNATTRIBUTED = "#d94f8a";
const CACHE = "#b9c2ce";
const OUTSIDE = "#7b8794";
const ENGINE = "#5b6ee1";
const PINNED = "#b08fe6";
const DRIVER = "#d9a8c7";
const PEAK = "#d2364c";
const RESERVED = "#c9a010";

const phaseOf = (part) => String(part).split("/")[0]; // "update/step" is a part of the update
// A ledger of somebody else's loop has phases by names of its own: each gets a colour that none of ours has.
const OTHER_PHASES = [...new Set(runs.flatMap((run) => run.ledger.flatMap((track) => track.phases)))].filter((phase) => !PHASE_COLOURS[phaseOf(phase)]);
function phaseColour(phase) {
  const other = OTHER_PHASES.indexOf(phase);
  return PHASE_COLOURS[phaseOf(phase)] || (other < 0 ? "#7b8794" : OTHER_PHASE_COLOURS[other % OTHER_PHASE_COLOURS.length]);
}
const phaseRank = (phase) => (PHASE_ORDER.includes(phaseOf(phase)) ? PHASE_ORDER.indexOf(phaseOf(phase)) : PHASE_ORDER.length);
const byPhase = (a, b) => phaseRank(a) - phaseRank(b);

function residentColour(name, names) {
  if (RESIDENT_COLOURS[name]) return RESIDENT_COLOURS[name];
  const others = names.filter((other) => !RESIDENT_COLOURS[other]);
  return OTHER_COLOURS[others.indexOf(name) % OTHER_COLOURS.length];
}

function translucent(colour, share) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
}

// Names of runs, told apart where two runs have the same.
const runNames = runs.map((run) => (runs.filter((other) => other.name === run.name).length > 1 ? run.path : run.name));
const curvesOf = runs.map((run) => new Map(run.curves.map((curve) => [curve.key, curve])));

function lastValue(curve) {
  if (!curve) return null;
  for (let at = curve.values.length - 1; at >= 0; at -= 1) if (isNumber(curve.values[at])) return { value: curve.values[at], step: curve.steps[at] };
  return null;
}

function firstValue(curve) {
  if (!curve) return null;
  const at = curve.values.findIndex(isNumber);
  return at < 0 ? null : { value: curve.values[at], step: curve.steps[at] };
}

function bestValue(curve, sign = 1) {
  let best = null;
  if (curve) curve.values.forEach((value, at) => {
    if (isNumber(value) && (best === null || sign * value > sign * best.value)) best = { value, step: curve.steps[at] };
  });
  return best;
}

const stepSeconds = (run) => {
  const totals = run.times.totals.filter((total) => !PARTS_OF_ROLLOUT.includes(total.name));
  const steps = run.num_rows - (run.curves.some((curve) => curve.steps[0] === 0) ? 1 : 0);
  const sum = totals.reduce((total, phase) => total + phase.seconds, 0);
  return totals.length && steps > 0 ? { mean: sum / steps, sum } : null;
};
// These two are parts of the phase `rollout`, not phases beside it.
const PARTS_OF_ROLLOUT = ["generate", "reward"];

function highestOf(run, key) {
  let best = null;
  for (const track of run.ledger) for (const phase of track.summary) {
    const found = phase.highest[key];
    if (found && (!best || found.value > best.value)) best = { ...found, phase: phase.phase, rank: track.rank };
  }
  return best;
}

function picker(options, onchange) {
  const select = element("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of options) select.append(element("option", { value }, text));
  return select;
}
