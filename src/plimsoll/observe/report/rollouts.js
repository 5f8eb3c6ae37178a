// Sampled responses: filtered, sorted, a page at a time.

const PAGE_SIZE = 20;
const samples = runs.flatMap((run, at) => run.rollouts.map((sample) => ({ ...sample, run: at })));
const filter = { text: "", from: null, to: null, low: null, high: null, status: "", finish: "", run: "", sort: "newest", page: 0 };

const SORTS = {
  newest: ["newest step first", (a, b) => b.step - a.step],
  oldest: ["oldest step first", (a, b) => a.step - b.step],
  best: ["highest reward first", (a, b) => rewardOr(b, -Infinity) - rewardOr(a, -Infinity)],
  worst: ["lowest reward first", (a, b) => rewardOr(a, Infinity) - rewardOr(b, Infinity)],
  longest: ["longest first", (a, b) => (b.response_length || 0) - (a.response_length || 0)],
  shortest: ["shortest first", (a, b) => (a.response_length || 0) - (b.response_length || 0)],
};

function rewardOr(sample, other) { return isNumber(sample.reward) ? sample.reward : other; }

function chosen() {
  const text = filter.text.toLowerCase();
  const found = samples.filter((s) =>
    (filter.run === "" || s.run === Number(filter.run)) && (filter.status === "" || s.score_status === filter.status) && (filter.finish === "" || s.finish_reason === filter.finish)
    && (filter.from === null || s.step >= filter.from) && (filter.to === null || s.step <= filter.to)
    && (filter.low === null || (isNumber(s.reward) && s.reward >= filter.low)) && (filter.high === null || (isNumber(s.reward) && s.reward <= filter.high))
    && (text === "" || [s.prompt, s.response, s.answer, s.score_detail, s.group].some((part) => part.toLowerCase().includes(text))));
  return found.sort((a, b) => SORTS[filter.sort][1](a, b) || b.step - a.step || a.run - b.run || (a.group < b.group ? -1 : a.group > b.group ? 1 : a.sample - b.sample)); // -Infinity - -Infinity is NaN: falls through
}

function buildRollouts() {
  const section = byId("rollouts");
  section.append(element("h2", {}, "Rollouts"));
  if (!samples.length) { section.append(element("p", { class: "notice plain" }, "No sampled responses: the run wrote none (fine-tuning, or observe.rollout_samples=0).")); return; }
  const list = element("div"), top = element("div", { class: "pager" }), bottom = element("div", { class: "pager" });
  const show = () => {
    const found = chosen();
    const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
    filter.page = Math.min(filter.page, pages - 1);
    const turn = (by) => () => { filter.page += by; show(); };
    for (const pager of [top, bottom]) {
      pager.replaceChildren(`${found.length.toLocaleString("en-US")} of ${samples.length.toLocaleString("en-US")} samples`,
        element("button", { type: "button", disabled: filter.page === 0, onclick: turn(-1) }, "‹ before"), `page ${filter.page + 1} of ${pages}`,
        element("button", { type: "button", disabled: filter.page >= pages - 1, onclick: turn(1) }, "next ›"));
    }
    bottom.hidden = pages === 1;
    list.replaceChildren(...found.slice(filter.page * PAGE_SIZE, (filter.page + 1) * PAGE_SIZE).map(sampleCard));
  };
  section.append(filters(() => { filter.page = 0; show(); }), top, list, bottom);
  show();
}

function filters(changed) {
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(changed, 120); };
  const numeric = (name, label) => element("input", { type: "number", step: "any", placeholder: label, "aria-label": `${name} ${label}`, oninput: (event) => { filter[name] = event.target.value === "" ? null : Number(event.target.value); later(); } });
  const one = (name, label, values) => values.length > 1 ? element("label", {}, label, picker([["", "all"], ...values], (value_) => { filter[name] = value_; changed(); })) : null;
  const values = (key) => [...new Set(samples.map((sample) => sample[key]))].filter((item) => item !== "").sort().map((item) => [item, item]);
  return element("div", { class: "filters" },
    element("label", { class: "search" }, "Text in prompt, response or answer", element("input", { type: "search", placeholder: "search", oninput: (event) => { filter.text = event.target.value; later(); } })),
    element("label", {}, "Step", element("span", { class: "range" }, numeric("from", "from"), numeric("to", "to"))),
    element("label", {}, "Reward", element("span", { class: "range" }, numeric("low", "from"), numeric("high", "to"))),
    one("run", "Run", runNames.map((name, at) => [at, name])), one("status", "Status", values("score_status")), one("finish", "Ended by", values("finish_reason")),
    element("label", {}, "Order", picker(Object.entries(SORTS).map(([name, [text]]) => [name, text]), (name) => { filter.sort = name; changed(); })));
}

const rewards = samples.map((sample) => sample.reward).filter(isNumber);
const lowestReward = rewards.reduce((a, b) => Math.min(a, b), Infinity), highestReward = rewards.reduce((a, b) => Math.max(a, b), -Infinity);

function rewardColour(reward) {
  if (!isNumber(reward)) return "var(--line)";
  const share = highestReward > lowestReward ? (reward - lowestReward) / (highestReward - lowestReward) : 1;
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
}

function sampleCard(sample) {
  const badge = (text, kind = "") => element("span", { class: `badge ${kind}` }, text);
  const parts = Object.entries(sample.score_parts);
  return element("article", { class: "sample", style: `border-left-color:${rewardColour(sample.reward)}` },
    element("div", { class: "meta" },
      element("span", { class: "reward" }, `reward ${isNumber(sample.reward) ? shown(sample.reward) : "none"}`),
      isNumber(sample.score) && sample.score !== sample.reward ? element("span", {}, `score ${shown(sample.score)}`) : null,
      several ? element("span", {}, element("i", { style: `color:${RUN_COLOURS[sample.run % RUN_COLOURS.length]}` }, "● "), runNames[sample.run]) : null,
      element("span", {}, `step ${sample.step}`), element("span", {}, `group ${sample.group}, sample ${sample.sample}`),
      element("span", {}, `${sample.prompt_length ?? "–"} + ${sample.response_length ?? "–"} tokens`),
      sample.finish_reason ? badge(sample.finish_reason, sample.finish_reason === "stop" ? "" : "warn") : null,
      sample.score_status && sample.score_status !== "ok" ? badge(sample.score_status, "bad") : null, sample.masked ? badge("masked", "warn") : null,
      parts.map(([name, part]) => element("span", {}, `${name} `, element("b", {}, shown(part))))),
    element("div", { class: "texts" }, textBlock("prompt", sample.prompt), textBlock("response", sample.response), textBlock("answer", sample.answer)),
    sample.score_detail ? element("details", { open: sample.score_status !== "ok" }, element("summary", {}, "what the reward said"), marked(sample.score_detail)) : null);
}

function textBlock(title, text) {
  const pre = marked(text);
  const block = element("div", {}, element("h4", {}, title), pre);
  if (text.length > 600 || text.split("\n").length > 7) {
    pre.classList.add("folded");
    const more = element("button", { class: "more", type: "button", onclick: () => { more.textContent = pre.classList.toggle("folded") ? "show all" : "fold"; } }, "show all");
    block.append(more);
  }
  return block;
}

// The text with what was searched for marked. Only text nodes: what a model wrote is never read as HTML.
function marked(text) {
  const pre = element("pre");
  const wanted = filter.text.toLowerCase(), lower = text.toLowerCase();
  let at = 0;
  if (wanted && lower.length === text.length) {
    for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, at)) {
      pre.append(text.slice(at, found), element("mark", {}, text.slice(found, found + wanted.length)));
      at = found + wanted.length;
    }
  }
  pre.append(text.slice(at));
  return pre;
}
