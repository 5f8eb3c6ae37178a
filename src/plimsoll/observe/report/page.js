// The page: overview, recipe, theme, and the order in which everything is drawn.

let ready = false;

const LEAVES = [
  "data.train", "data.eval", "data.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_response_tokens", "rollout.temperature", "reward.function",
  "algorithm.clip_low", "algorithm.clip_high", "algorithm.kl_coefficient", "algorithm.dynamic_sampling", "train.learning_rate", "train.schedule", "train.mini_batches_per_step",
  "model.dtype", "model.compute_dtype", "seed",
];

const plainValue = (text) => (text === undefined ? "–" : text.replace(/^"(.*)"$/, "$1"));

function buildOverview() {
  const section = byId("overview");
  byId("brand-name").textContent = several ? `${runs.length} runs` : runNames[0];
  if (several) { section.append(element("h1", {}, "Comparison of ", runNames.join(", "))); buildComparison(section); } else buildOne(section, runs[0]);
  runs.forEach((run, at) => run.notes.forEach((note) => section.append(element("p", { class: /thinned|timeline shows|samples are shown/.test(note) ? "notice plain" : "notice" }, several ? `${runNames[at]}: ${note}` : note))));
}

const stepsText = (run) => (run.steps_planned ? `${run.steps_done.toLocaleString("en-US")} of ${run.steps_planned.toLocaleString("en-US")} steps` : `${run.steps_done.toLocaleString("en-US")} steps`);
const isLedger = (run) => run.kind === "ledger";
const isSft = (run) => !run.curves.some((curve) => curve.key.startsWith("reward/")) && run.curves.some((curve) => curve.key === "loss");

function buildOne(section, run) {
  section.append(
    element("h1", {}, run.name, isLedger(run) && run.state !== "running" ? null : element("span", { class: `state ${run.state}` }, run.state)),
    element("p", { class: "sub" }, isLedger(run) ? `memory ledger${run.model === "unknown" ? "" : ` · ${run.model}`} · ${run.device} · ${stepsText(run)} · last row ${when(run.last_row_at)} · page of ${when(report.written_at)}` : `${isSft(run) ? "fine-tuning" : run.algorithm} · ${run.model} · ${run.device} · ${stepsText(run)} · last row ${when(run.last_row_at)} · page of ${when(report.written_at)}`),
    element("div", { class: "tiles" }, tiles(run)),
    element("div", { class: "leaves" }, LEAVES.filter((key) => key in run.recipe && !(isSft(run) && /^(rollout|algorithm)/.test(key))).map((key) => element("span", { class: "leaf" }, element("b", {}, key), plainValue(run.recipe[key])))));
}

function tile(label, main, detail, extra) {
  return element("div", { class: "tile" }, element("div", { class: "label" }, label), element("div", { class: "value" }, main), detail ? element("div", { class: "detail" }, detail) : null, extra || null);
}

function tiles(run) {
  const curves = new Map(run.curves.map((curve) => [curve.key, curve]));
  const found = [];
  const share = run.steps_planned ? Math.min(1, run.steps_done / run.steps_planned) : null;
  found.push(tile("Steps", [String(run.steps_done.toLocaleString("en-US")), run.steps_planned ? element("small", {}, ` / ${run.steps_planned.toLocaleString("en-US")}`) : ""], null,
    share === null ? null : element("div", { class: "progress" }, element("div", { style: `width:${(100 * share).toFixed(1)}%` }))));
  const change = (key, label, sign) => {
    const last = lastValue(curves.get(key)), first = firstValue(curves.get(key)), best = bestValue(curves.get(key), sign);
    if (last) found.push(tile(label, shown(last.value), `from ${shown(first.value)}; ${sign > 0 ? "best" : "lowest"} ${shown(best.value)} at step ${best.step}`));
  };
  change("reward/mean", "Reward, last step", 1);
  if (!curves.has("reward/mean")) change("loss", "Loss, last step", -1);
  const before = firstValue(curves.get("eval/accuracy")), after = lastValue(curves.get("eval/accuracy")), best = bestValue(curves.get("eval/accuracy"));
  if (after) found.push(tile("Held-out accuracy", before.step === after.step ? shown(after.value) : [element("small", {}, `${shown(before.value)} → `), shown(after.value)], `best ${shown(best.value)} at step ${best.step}`));
  const speed = lastValue(curves.get("speed/tokens_per_second")), fastest = bestValue(curves.get("speed/tokens_per_second"));
  if (speed) found.push(tile("Generation", [shown(speed.value), element("small", {}, " tokens/s")], `at most ${shown(fastest.value)}`));
  const time = stepSeconds(run);
  if (time) found.push(tile("Time a step", seconds(time.mean), `${seconds(time.sum)} in all`));
  const device = highestOf(run, "device_peak"), total = highestOf(run, "device_total"), used = highestOf(run, "device_used");
  if (device) found.push(tile("Peak device memory", bytes(device.value), `${device.phase}, step ${device.step}; used ${bytes(used && used.value)} of ${bytes(total && total.value)}`));
  const host = highestOf(run, "host_anonymous_peak"), limit = highestOf(run, "host_limit");
  if (host) found.push(tile("Peak host memory", bytes(host.value), `${host.phase}, step ${host.step}; limit ${bytes(limit && limit.value)}`));
  return found;
}

// Several runs: the same numbers side by side, the best of a row in bold.
const COMPARED = [
  ["reward, last", "reward/mean", lastValue, 1], ["reward, best", "reward/mean", bestValue, 1], ["held-out accuracy, before", "eval/accuracy", firstValue, 0], ["held-out accuracy, last", "eval/accuracy", lastValue, 1],
  ["held-out accuracy, best", "eval/accuracy", bestValue, 1], ["loss, last", "loss", lastValue, 0], ["response length, last", "response/length_mean", lastValue, 0], ["truncated share, last", "response/truncated_share", lastValue, 0],
  ["entropy, last", "actor/entropy", lastValue, 0], ["KL to the reference, last", "actor/kl_ref", lastValue, 0], ["gradient norm, last", "train/grad_norm", lastValue, 0],
  ["log-prob difference, highest", "mismatch/logprob_diff_max", bestValue, 0], ["tokens/s, last", "speed/tokens_per_second", lastValue, 1],
];

function buildComparison(section) {
  const cells = (values, format, best, detail) => {
    const known = values.filter(isNumber);
    const top = best && known.length > 1 ? (best > 0 ? Math.max(...known) : Math.min(...known)) : null;
    return values.map((item, at) => element("td", { class: item === null ? "none" : top !== null && item === top ? "leading" : null, title: detail ? detail(at) : null }, item === null ? "–" : format(item)));
  };
  const rows = [
    element("tr", {}, element("td", {}, "state"), runs.map((run) => element("td", {}, isLedger(run) ? "ledger alone" : run.state))),
    element("tr", {}, element("td", {}, "steps"), runs.map((run) => element("td", {}, run.steps_planned ? `${run.steps_done} / ${run.steps_planned}` : run.steps_done))),
    element("tr", {}, element("td", {}, "algorithm"), runs.map((run) => element("td", {}, isSft(run) ? "fine-tuning" : run.algorithm))),
    element("tr", {}, element("td", {}, "model"), runs.map((run) => element("td", {}, run.model))),
  ];
  for (const [title, key, pick, best] of COMPARED) {
    const found = curvesOf.map((curves) => pick(curves.get(key)));
    if (found.some((item) => item)) rows.push(element("tr", {}, element("td", {}, title), cells(found.map((item) => (item ? item.value : null)), shown, best, (at) => (found[at] ? `step ${found[at].step}` : null))));
  }
  const more = [["time a step", runs.map((run) => (stepSeconds(run) || { mean: null }).mean), seconds], ["peak device memory", runs.map((run) => (highestOf(run, "device_peak") || { value: null }).value), bytes], ["peak host memory", runs.map((run) => (highestOf(run, "host_anonymous_peak") || { value: null }).value), bytes]];
  for (const [title, values, format] of more) if (values.some(isNumber)) rows.push(element("tr", {}, element("td", {}, title), cells(values, format, -1)));
  section.append(element("p", { class: "sub" }, `page of ${when(report.written_at)}`),
    element("div", { class: "card stacked", style: "margin-top:14px" }, element("div", { class: "scroll" }, comparisonTable(rows))), runs.every(isLedger) ? "" : recipeDifferences());
}

function comparisonTable(rows, textual = false) {
  return element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, ""), runNames.map((name, at) => element("th", { class: textual ? "text" : null, title: runs[at].path }, element("span", { class: "swatch", style: `background:${RUN_COLOURS[at % RUN_COLOURS.length]}` }), name)))), element("tbody", {}, rows));
}

function recipeDifferences() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.recipe)))].filter((key) => !["name", "run_root"].includes(key) && new Set(runs.map((run) => run.recipe[key])).size > 1);
  const rows = keys.map((key) => element("tr", {}, element("td", {}, key), runs.map((run) => element("td", { class: "text" }, plainValue(run.recipe[key])))));
  return element("div", { class: "card stacked" }, element("div", { class: "head" }, element("h3", {}, "Recipe keys that differ")),
    keys.length ? element("div", { class: "scroll" }, comparisonTable(rows, true)) : element("p", { class: "about" }, "None: the recipes are the same but for the name."));
}

function buildRecipe() {
  const section = byId("recipe");
  section.append(element("h2", {}, "Recipe"));
  runs.forEach((run, at) => {
    if (isLedger(run)) return;
    const rows = Object.entries(run.recipe).map(([key, text]) => element("tr", {}, element("td", {}, key), element("td", { class: "text" }, plainValue(text))));
    const search = element("input", { type: "search", placeholder: "search keys and values", oninput: () => rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase()); }) });
    section.append(element("details", { class: "card stacked" }, element("summary", {}, `${runNames[at]}: all ${rows.length} settings, as the run used them`), search, element("div", { class: "scroll" }, table(["key", ""], rows))));
  });
}

function buildTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => { document.documentElement.dataset.theme = theme; document.documentElement.style.colorScheme = theme; if (ready) redraw(); };
  let asked = document.documentElement.dataset.theme;
  set(asked || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!asked) set(dark.matches ? "dark" : "light"); });
  let before = null; // on paper the page is light
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; if (before !== "light") set("light"); });
  addEventListener("afterprint", () => { if (before && before !== "light") set(before); });
  byId("theme").addEventListener("click", () => { asked = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; set(asked); });
}

// For the tests: what was drawn, read back from the charts themselves.
function selfCheck() {
  const drawn = charts.map((made) => ({
    id: made.id, svg: made.plot.querySelectorAll(".trace").length,
    traces: made.plot.data.map((trace) => ({ name: trace.name, type: trace.type, meta: trace.meta, x: [...trace.x], y: [...trace.y] })),
  }));
  document.documentElement.dataset.check = JSON.stringify(drawn);
}

buildTheme();
buildOverview();
const sections = { curves: buildCurves, times: buildTimes, memory: buildMemory, rollouts: buildRollouts, recipe: buildRecipe };
for (const [id, build] of Object.entries(sections)) {
  if (id === "memory" || !runs.every(isLedger)) { build(); continue; }
  byId(id).remove(); // a ledger has nothing to show there
  document.querySelector(`nav a[href="#${id}"]`).remove();
}
byId("foot").textContent = `plimsoll ${report.version} · ${runs.map((run) => run.path).join(" · ")}`;
drawAll(() => {
  ready = true;
  document.documentElement.dataset.ready = "yes";
  if (new URLSearchParams(location.search).has("check")) selfCheck();
});
