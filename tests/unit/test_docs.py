"""What the documentation names exists: files, headings, commands, targets and keys. Nothing is fetched."""

import re
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.core import TyperGroup
from typer.main import get_command

from plimsoll.cli import app
from plimsoll.config.aliases import ALIASES, KNOWN_ELSEWHERE
from plimsoll.config.base import Section
from plimsoll.config.load import load_recipe
from plimsoll.config.planned import MemoryPlan
from plimsoll.config.reference import COMMAND, anchor, configuration_markdown, known_keys
from plimsoll.config.schema import leaves, sections
from plimsoll.data.tasks.problems import TASKS
from plimsoll.memory.plan import capacity, constants, host, moved
from plimsoll.memory.plan.advice import advise
from plimsoll.memory.plan.choose import plan_without_advice
from plimsoll.memory.plan.job import GIB, Job, Machine
from tests import plan_examples

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

FENCE = re.compile(r"^```.*?^```[ ]*$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"""\]\(([^()\s]+)\)|(?:src|href)="([^"]+)\"""")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)
EXTERNAL = re.compile(r"https://[a-z0-9.-]+\.[a-z]+(/\S*)?")
ID = re.compile(r'<a id="([^"]+)">')

COMMANDS = re.compile(r"(?<![\w./'-])plimsoll +([a-z][a-z-]*)\b(?!\.)")
TARGETS = re.compile(r"(?<![\w-])make +(?!it fit)([a-z][a-z0-9-]+)\b")
KEY = re.compile(r"[a-z]+(?:\.[a-z_0-9*]+)+")

FILE_ENDINGS = ("yaml", "py", "json", "jsonl", "md", "toml", "txt", "html", "safetensors", "gguf", "parquet")
"""Last parts of dotted words that make them file names: `memory.jsonl` is no key."""

OF_OTHERS = DOCS / "coming-from.md"

TAKEN = ("--train_batch_size", "rollout.val_kwargs.n")
"""Their keys whose last part means something else in a more frequent key: the message answers that one."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", text_of(path))


def code(path: Path) -> list[str]:
    """Code spans of the page, and each line of its code blocks."""
    blocks = [line for block in FENCE.findall(text_of(path)) for line in block.splitlines()[1:-1]]
    return [*CODE.findall(prose(path)), *blocks]


def slug(heading: str) -> str:
    """The anchor of a heading where GitHub's rule and Python-Markdown's are one."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in HEADING.findall(prose(path))} | set(ID.findall(prose(path)))


def links(page: Path) -> list[str]:
    return [markdown or html for markdown, html in LINK.findall(prose(page))]


def broken_link(page: Path, target: str) -> str | None:
    """Why the target does not exist, or None."""
    if re.match(r"[a-z]+:", target):
        return None if EXTERNAL.fullmatch(target) else "an external link is https://HOST/…"
    path, _, fragment = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "no such file"
    if DOCS in page.parents and DOCS not in file.parents:
        return "outside docs/, where the site cannot follow"
    if fragment and (file.suffix != ".md" or fragment not in anchors(file)):
        return f"no heading and no anchor #{fragment}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    found = {target: broken_link(page, target) for target in links(page)}
    assert {target: why for target, why in found.items() if why} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_have_the_same_anchor_on_github_and_on_the_site(page: Path) -> None:
    slugs = [slug(heading) for heading in HEADING.findall(prose(page))]
    assert len(slugs) == len(set(slugs)), "two headings of one name"
    assert [found for found in slugs if "--" in found or not found.isascii()] == [], "the two renderers differ here"


def test_every_page_is_in_the_navigation() -> None:
    settings = YAML(typ="safe").load(text_of(ROOT / "mkdocs.yml"))
    listed = [page for entry in settings["nav"] for page in entry.values()]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_target_exists(page: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    known = set(group.commands)
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", text_of(ROOT / "Makefile"), re.M))
    spans = code(page)
    assert {word for span in spans for word in COMMANDS.findall(span)} - known == set()
    assert {word for span in spans for word in TARGETS.findall(span)} - targets == set()


def unknown_keys(page: Path) -> set[str]:
    """Dotted words in code, of a section of the recipe, that the schema does not know."""
    free = tuple(key for key, leaf in leaves().items() if leaf.free_form)
    known = {*known_keys(), *ALIASES}
    unknown: set[str] = set()
    for span in code(page):
        if "unknown key" in span or "is not an option" in span:
            continue  # the answer to a mistake, quoted
        for match in KEY.finditer(span):
            word, before = match[0], span[: match.start()]
            parts = word.split(".")
            if parts[0] not in sections() or parts[-1] in FILE_ENDINGS or re.search(r"[\w./:-]$", before):
                continue
            if word in known or word.removesuffix(".*") in sections() or word.startswith(tuple(f"{k}." for k in free)):
                continue
            unknown.add(word)
    return unknown


@pytest.mark.parametrize("page", [page for page in PAGES if page != OF_OTHERS], ids=name_of)
def test_every_key_of_a_recipe_exists(page: Path) -> None:
    assert unknown_keys(page) == set()


def rows_of_others() -> list[tuple[str, str]]:
    """(their cell, ours) of the tables for people who come from elsewhere."""
    rows = [line.split("|") for line in prose(OF_OTHERS).splitlines() if line.startswith("| `")]
    return [(row[1], row[2]) for row in rows]


@pytest.mark.parametrize(("theirs", "ours"), rows_of_others())
def test_a_key_of_another_framework_leads_to_ours_on_the_page_and_in_the_message(theirs: str, ours: str) -> None:
    (key,) = CODE.findall(ours)
    assert key in leaves()
    for name in CODE.findall(theirs):
        last = name.removeprefix("--").rpartition(".")[2]
        assert KNOWN_ELSEWHERE.get(last, key) == key or name in TAKEN


def test_no_known_name_of_others_is_hidden_by_a_name_of_ours() -> None:
    """A key of ours of the same name is suggested first, so such an entry would never be read."""
    assert [name for name in KNOWN_ELSEWHERE if any(leaf.name == name for leaf in leaves().values())] == []
    assert set(KNOWN_ELSEWHERE.values()) <= set(leaves())


@pytest.mark.parametrize("page", plan_examples.PAGES, ids=name_of)
def test_plans_are_shown_as_they_are_printed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(capacity, "find_gpus", lambda: None)  # one that is here would bound the recipe's capacity
    assert "$ plimsoll plan " in text_of(page)
    outdated = f"{name_of(page)} is out of date: run `{plan_examples.COMMAND}`"
    assert plan_examples.refreshed(text_of(page)) == text_of(page), outdated


def test_the_configuration_page_is_the_generated_one() -> None:
    page = text_of(DOCS / "configuration.md")
    assert page == configuration_markdown(), f"docs/configuration.md is out of date: run `{COMMAND}`"


def test_the_configuration_page_has_an_anchor_for_every_key() -> None:
    found = ID.findall(configuration_markdown())
    assert len(found) == len(set(found))
    assert set(found) == {anchor(key) for key in known_keys() if key not in sections()}
    assert {"reward-parts-NAME-weight", "rollout-eval-correct_part", "seed"} <= set(found)


def test_the_configuration_page_shows_defaults_presets_and_links() -> None:
    rows = {ID.findall(line)[0]: line for line in configuration_markdown().splitlines() if line.startswith("| <a id")}
    assert "a number, at least 0<br>default `1e-06`" in rows["train-learning_rate"]
    assert "preset: `0.2` (grpo), `0.28` (dapo)" in rows["algorithm-clip_high"]
    assert "**required**" in rows["data-train"]
    assert "[`train.epochs`](#train-epochs)" in rows["train-steps"]


@pytest.mark.parametrize("name", TASKS)
def test_every_built_in_task_stands_in_the_page_about_data_with_its_options_and_an_example(name: str) -> None:
    task = TASKS[name]
    (row,) = [line for line in prose(DOCS / "data.md").splitlines() if line.startswith(f"| `{name}` ")]
    _, _, prompt, answer, options, _ = row.split("|")
    page = CODE.findall(prose(DOCS / "data.md"))
    for option in task.options.model_fields:
        assert option in CODE.findall(options) or option in page, option
    example = task.make(task.options(), 1)
    assert CODE.findall(prompt)[0].translate(WITHOUT_ALNUM) == example.prompt.translate(WITHOUT_ALNUM)
    assert CODE.findall(answer)


WITHOUT_ALNUM = str.maketrans("", "", "0123456789abcdefghijklmnopqrstuvwxyz")
"""Leaves the mark of a task: `>` in `483920>`."""


MEASURED = {
    "CUDA context": constants.CUDA_CONTEXT,
    "first communicator": constants.FIRST_COMMUNICATOR,
    "each further communicator": constants.FURTHER_COMMUNICATOR,
    "vLLM asleep, without CUDA graphs": constants.VLLM_BUFFERS,
    "its CUDA graphs": constants.VLLM_GRAPHS,
    "growth of a process on a GPU": host.PROCESS_BYTES["cuda"],
    "growth of a process on a CPU": host.PROCESS_BYTES["cpu"],
    "an engine in the process": host.ENGINE_BYTES,
}
"""Row of docs/memory.md → bytes."""


@pytest.mark.parametrize("name", MEASURED)
def test_figures_of_the_plan_that_have_no_formula_stand_in_the_page_about_memory(name: str) -> None:
    (row,) = [line for line in prose(DOCS / "memory.md").splitlines() if line.startswith(f"| {name} |")]
    number, unit, *_ = row.split("|")[2].split()
    assert float(number) == pytest.approx(MEASURED[name] / {"GiB": 2**30, "MiB": 2**20}[unit], rel=1e-3)


def test_speeds_of_the_plan_stand_in_the_page_about_memory() -> None:
    page = prose(DOCS / "memory.md")
    speeds = moved.REFERENCE_SPEED
    assert f"| {moved.STREAM_SPEED / 1e9:.0f} GB/s, both directions together |" in page
    assert f"| {moved.ARENA_SPEED / 1e9:.0f} GB/s |" in page
    found = [f"{speeds[name] / 1e9:.0f}" for name in ("page_cache", "ring", "arena")]
    assert "| {} GB/s `page_cache`, {} `ring`, {} `arena` |".format(*found) in page
    assert f"{moved.NODE_SPEED / 1e9:.0f} GB/s in a node, {moved.NETWORK_SPEED / 1e9:.0f} between nodes" in page


@pytest.mark.parametrize("state", ["device", "streamed"])
def test_the_order_of_what_helps_is_that_of_the_advice(state: str) -> None:
    rows = [line.split("|")[2] for line in prose(DOCS / "memory.md").splitlines() if re.match(r"\| \d+ \| `", line)]
    other = {"device": "streamed", "streamed": "device"}[state]
    listed = [key for row in rows for key in CODE.findall(row) if "." in key]
    listed = [key.partition("=")[0] for key in listed if key != f"train.optimizer_state={state}"]
    assert any(f"train.optimizer_state={other}" in row for row in rows)
    overrides = ["checkpoint.background=true", "algorithm.kl_coefficient=0.1", "parallel.shard=4"]
    overrides.append(f"model.config={ROOT / 'recipes' / 'models' / 'Qwen3-8B'}")
    job = capacity.job_of(load_recipe(ROOT / "recipes" / "qwen3_8b_8xh200.yaml", overrides), "policy")
    small = Machine(device="cuda", device_bytes=8 * GIB, host_bytes=2000 * GIB, ranks=8, ranks_per_node=8)
    refused = plan_without_advice(job, small)
    chosen = {"optimizer_state": state, "activation_checkpointing": "none", "token_budget": 2**16, "kv_bytes": 2**36}
    refused = refused.model_copy(update={"choices": refused.choices.model_copy(update=chosen)})
    tried: list[str] = []

    def replan(changed: Job) -> MemoryPlan:
        differs = {
            f"{section}.{key}"
            for section, values in job.recipe
            if isinstance(values, Section)
            for key, value in dict(changed.recipe)[section]
            if value != dict(values)[key]
        }
        tried.extend(differs if len(differs) == 1 else ())  # later ones are combinations
        return refused

    advise(job, small, refused, replan)
    assert list(dict.fromkeys(tried)) == listed
