// Curves of metrics.jsonl over the steps.

// keys: [key, name]; a key that ends in * stands for every key that begins so. band: lowest and highest, shaded.
const CURVES = [
  { id: "reward", title: "Reward", unit: "reward", keys: [["reward/mean", "mean"]], band: ["reward/min", "reward/max"],
    about: "Mean over the scored samples that were trained on; the shaded band runs from the lowest to the highest. It should rise, not always evenly." },
  { id: "accuracy", title: "Held-out accuracy", unit: "share", keys: [["eval/accuracy", "accuracy"], ["eval/pass_at_*", "pass@"]], markers: true, skipCopies: true,
    about: "On rows that are not trained on. Reward that rises while this stays or falls: the policy learns the training rows, or a weakness of the reward." },
  { id: "length", title: "Response length", unit: "tokens", keys: [["response/length_mean", "mean"], ["response/length_max", "max"]],
    about: "Of the samples trained on. A mean that runs to the limit, or to a few tokens, without a better reward is a warning." },
  { id: "truncated", title: "Truncated share", unit: "share", keys: [["response/truncated_share", "truncated"]],
    about: "Samples that were cut at rollout.max_response_tokens. Much of it: raise the limit, or use the overlong settings." },
  { id: "entropy", title: "Entropy", unit: "nats", keys: [["actor/entropy", "entropy"]],
    about: "Of the policy at sampled tokens. A fall to near 0 ends exploration; a rise without end is a policy that falls apart." },
  { id: "kl", title: "KL divergence", unit: "nats", keys: [["actor/kl_ref", "to the reference"], ["actor/kl_reward", "in the reward"], ["actor/approx_kl", "old ‖ new"]],
    about: "To the reference, where there is one, and between the policy before and after the step's updates." },
  { id: "grad", title: "Gradient norm", unit: "", axis: "norm", keys: [["train/grad_norm", "before clipping"]],
    about: "Mean over the step's optimizer steps, before clipping. Spikes that come again: lower the learning rate." },
  { id: "lr", title: "Learning rate", unit: "", axis: "learning rate", keys: [["train/learning_rate", "learning rate"]], about: "Of the step's last optimizer step." },
  { id: "loss", title: "Loss", unit: "", axis: "loss", keys: [["loss", "loss"]],
    about: "Mean over the step's optimizer steps. In reinforcement learning its height says little; in fine-tuning it should fall." },
  { id: "clipped", title: "Clipped shares", unit: "share of tokens", keys: [["actor/clipped_low", "low"], ["actor/clipped_high", "high"], ["actor/dual_clipped", "dual"]],
    about: "Sampled tokens where a clip of the ratio took effect. Above a few percent the steps are too large for the data." },
  { id: "ratio", title: "Probability ratio", unit: "new ÷ old", keys: [["actor/ratio_mean", "mean"], ["actor/ratio_max", "max"]], about: "Of the policy being trained to the one that made the batch, at sampled tokens." },
  { id: "mismatch", title: "Mismatch: log-prob difference", unit: "nats", keys: [["mismatch/logprob_diff_mean", "mean"], ["mismatch/logprob_diff_max", "max"]], logByDefault: true,
    about: "Absolute difference of the trainer's log-probability to the engine's, at sampled tokens. It should be small and level; growth means that the two compute different things." },
  { id: "mismatch-kl", title: "Mismatch: KL", unit: "nats", keys: [["mismatch/kl", "k1"], ["mismatch/kl_k3", "k3"]], about: "Estimates of KL(engine ‖ trainer). k1 may be negative." },
  { id: "perplexity", title: "Mismatch: perplexity ratio", unit: "trainer ÷ engine", keys: [["mismatch/perplexity_ratio", "ratio"]], about: "1 means that trainer and engine agree on the samples." },
  { id: "weights", title: "Importance weights", unit: "", axis: "weight or share", keys: [["mismatch/weight_mean", "mean"], ["mismatch/weight_max", "max"], ["mismatch/effective_share", "effective share"], ["mismatch/truncated", "capped share"]],
    about: "Weights that correct for the mismatch. An effective share far below 1: few tokens carry the gradient." },
  { id: "parts", title: "Reward parts", unit: "score", keys: [["reward/part/*", ""]], about: "Mean of each part of the reward, unweighted." },
  { id: "eval-parts", title: "Held-out parts", unit: "score", keys: [["eval/part/*", ""]], markers: true, about: "The same, held-out." },
  { id: "signal", title: "Groups without signal", unit: "groups", keys: [["advantage/no_signal_groups", "trained on"], ["rollout/no_signal_groups", "sampled"], ["rollout/groups", "sampled in all"]],
    about: "Groups of equal rewards teach nothing. Most of them without signal: the task is too easy or too hard for this policy." },
  { id: "unscored", title: "Not scored", unit: "samples", keys: [["reward/unscored", "no score"], ["reward/timeouts", "time-outs"], ["reward/errors", "errors"]], onlyIfAny: true, about: "Samples for which the reward function gave no score." },
  { id: "speed", title: "Generation speed", unit: "tokens/s", keys: [["speed/tokens_per_second", "sampled"]], about: "Sampled tokens over the time of generation." },
  { id: "tokens", title: "Tokens trained on", unit: "tokens", keys: [["train/tokens", "tokens"]], about: "Prompt and response, through the update." },
];
const DRAWN_ELSEWHERE = /^time\//;
const STYLES = { solid: "—", dot: "┈", dash: "╌", dashdot: "─·" };
let smoothing = 0;

const allKeys = [...new Set(curvesOf.flatMap((curves) => [...curves.keys()]))];

function matching(spec) {
  const found = [];
  for (const [pattern, name] of spec.keys) {
    if (!pattern.endsWith("*")) { if (allKeys.includes(pattern)) found.push([pattern, name]); continue; }
    const start = pattern.slice(0, -1);
    for (const key of allKeys.filter((other) => other.startsWith(start)).sort()) found.push([key, name + key.slice(start.length)]);
  }
  return found.filter(([key]) => !(spec.skipCopies && key === "eval/pass_at_1" && allKeys.includes("eval/accuracy")));
}

const hasValues = (key) => curvesOf.some((curves) => curves.has(key) && curves.get(key).values.some(isNumber));

// Exponential mean, corrected for its start, over the values that are there.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function seriesOf(keys) {
  const series = [];
  keys.forEach(([key, name], index) => runs.forEach((run, at) => {
    const curve = curvesOf[at].get(key);
    if (!curve || !curve.values.some(isNumber)) return;
    series.push({
      key, run: at, curve, name: several && keys.length === 1 ? "" : name,
      colour: several ? RUN_COLOURS[at % RUN_COLOURS.length] : SERIES_COLOURS[index % SERIES_COLOURS.length],
      dash: several ? ["solid", "dot", "dash", "dashdot"][index % 4] : "solid",
    });
  }));
  return series;
}

function bands(spec) {
  if (!spec.band || several) return []; // bands of several runs hide one another
  return runs.flatMap((run, at) => {
    const [low, high] = spec.band.map((key) => curvesOf[at].get(key));
    if (!low || !high) return [];
    const edge = { type: "scatter", mode: "lines", line: { width: 0, shape: "linear" }, hoverinfo: "skip", connectgaps: true };
    return [
      { ...edge, x: low.steps, y: low.values, name: spec.band[0], meta: { key: spec.band[0], run: at } },
      { ...edge, x: high.steps, y: high.values, name: spec.band[1], fill: "tonexty", fillcolor: translucent(SERIES_COLOURS[0], 0.12), meta: { key: spec.band[1], run: at } },
    ];
  });
}

function lines(series, markers) {
  const few = series.every(({ curve }) => curve.steps.length <= 60);
  return series.flatMap(({ key, run, curve, name, colour, dash }) => {
    const smooth = smoothing > 0 && curve.values.length > 3;
    const mode = markers || curve.steps.length === 1 ? "lines+markers" : "lines";
    const raw = { type: "scatter", mode, x: curve.steps, y: curve.values, name: several ? runNames[run] : name, hoverinfo: "none", connectgaps: false, opacity: smooth ? 0.3 : 1,
      line: { color: colour, width: smooth ? 1 : few ? 1.8 : 1.4, dash }, marker: { size: 5, color: colour }, meta: { key, run } };
    if (!smooth) return [raw];
    return [raw, { ...raw, mode: "lines", y: smoothed(curve.values, smoothing), opacity: 1, line: { color: colour, width: 2, dash }, meta: { smoothed: key, run } }];
  });
}

function nearest(steps, x) {
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && Math.abs(steps[low - 1] - x) <= Math.abs(steps[low] - x) ? low - 1 : low;
}

function readCurves(series, x) {
  const shownNames = new Set();
  const values = series.map(({ key, run, curve, name, colour, dash }) => {
    const found = x === null ? lastValue(curve) : { value: curve.values[nearest(curve.steps, x)], step: curve.steps[nearest(curve.steps, x)] };
    const other = x !== null && found.step !== Math.round(x) ? ` (${found.step})` : "";
    if (!several) return value(colour, name, shown(found.value) + other);
    // Of several runs the series is named once, with the style of its lines; the colours are those of the runs.
    const first = !shownNames.has(key);
    shownNames.add(key);
    return [first && name ? element("span", { class: "series" }, `${name} ${STYLES[dash]}`) : null, value(colour, "", shown(found.value) + other, runNames[run])];
  });
  const flat = values.flat().filter((node) => node);
  return x === null ? flat : [element("span", { class: "at" }, `step ${Math.round(x)}`), ...flat];
}

const lowest = (series) => series.reduce((least, { curve }) => curve.values.reduce((a, b) => (isNumber(b) ? Math.min(a, b) : a), least), Infinity);

// Over more than a decade and a half, ticks at powers of ten only.
function decades(series) {
  const values = series.flatMap(({ curve }) => curve.values.filter((item) => isNumber(item) && item > 0));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0);
  return high / low > 30 ? { dtick: 1 } : {};
}

function curveChart(spec) {
  const keys = matching(spec).filter(([key]) => hasValues(key));
  const positive = (series) => series.some(({ curve }) => curve.values.some((value) => isNumber(value) && value > 0));
  const series = seriesOf(keys);
  if (!series.length) return null;
  if (spec.onlyIfAny && !series.some(({ curve }) => curve.values.some((value) => value))) return null;
  let log = Boolean(spec.logByDefault) && positive(series);
  const button = toggle("log", "Logarithmic scale; values of 0 and below are not drawn then", (on) => { log = on; made.draw(); });
  button.setAttribute("aria-pressed", String(log));
  const made = chart({
    id: spec.id, title: spec.title, unit: spec.unit, about: spec.about, byStep: true, buttons: [button],
    build: () => ({
      traces: [...(log ? [] : bands(spec)), ...lines(series, spec.markers)],
      layout: layout("step", spec.unit || spec.axis || "value", { yaxis: log ? { type: "log", ...decades(series) } : { nticks: 6, rangemode: lowest(series) >= 0 ? "nonnegative" : "normal" } }),
    }),
    readout: (x) => readCurves(series, x),
  });
  return made;
}

function buildCurves() {
  const section = byId("curves");
  section.append(element("h2", {}, "Curves"));
  if (!allKeys.length) { section.append(element("p", { class: "notice" }, "No step is done yet.")); return; }
  const grid = element("div", { class: "grid" });
  const used = new Set();
  for (const spec of CURVES) {
    const made = curveChart(spec);
    [...spec.keys.map(([key]) => key), ...matching(spec).map(([key]) => key), ...((!several && spec.band) || [])].forEach((key) => used.add(key));
    if (made) grid.append(made.card);
  }
  const rest = allKeys.filter((key) => !used.has(key) && !DRAWN_ELSEWHERE.test(key) && hasValues(key)).sort();
  section.append(curveTools(grid, rest), grid);
}

function curveTools(grid, rest) {
  const amount = element("span", {}, "off");
  const slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: 0, "aria-label": "Smoothing" });
  let timer = 0;
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    amount.textContent = smoothing ? smoothing.toFixed(2) : "off";
    clearTimeout(timer);
    timer = setTimeout(() => charts.filter((made) => made.byStep && made.drawn).forEach((made) => made.draw()), 60);
  });
  const legend = several ? element("span", { class: "readout" }, runNames.map((name, at) => element("span", {}, element("i", { style: `background:${RUN_COLOURS[at % RUN_COLOURS.length]}` }), name))) : null;
  return element("div", { class: several ? "tools sticky" : "tools" }, element("label", {}, "Smoothing", slider, amount), legend,
    element("span", { class: "spread" }, moreMetrics(grid, rest)));
}

function moreMetrics(grid, rest) {
  if (!rest.length) return "";
  const added = new Map();
  const add = (key) => {
    if (!added.has(key)) {
      const made = curveChart({ id: `more-${key.replace(/[^\w]/g, "-")}`, title: key, unit: "", keys: [[key, "value"]] });
      made.card.querySelector(".buttons").append(element("button", { type: "button", title: "Remove", onclick: () => { removeChart(made); added.delete(key); } }, "×"));
      added.set(key, made);
      grid.append(made.card);
      made.draw();
    }
    added.get(key).card.scrollIntoView({ block: "nearest" });
  };
  const select = picker([["", `More metrics (${rest.length}) …`], ["*", "all of them"], ...rest.map((key) => [key, key])], (key) => {
    if (key === "*") rest.forEach(add); else if (key) add(key);
    select.value = "";
  });
  return select;
}
