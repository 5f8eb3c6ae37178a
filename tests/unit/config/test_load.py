"""File + overrides → recipe, or every problem at once."""

import re
from pathlib import Path

import pytest

from plimsoll.config.aliases import ALIASES, KNOWN_ELSEWHERE
from plimsoll.config.checks import check_train
from plimsoll.config.load import load as load_with_notes
from plimsoll.config.load import load_recipe
from plimsoll.config.presets import PRESETS
from plimsoll.config.schema import leaves, sections
from plimsoll.errors import RecipeError
from tests.unit.config.recipes import MINIMAL, causes_of, load, one_cause


def test_a_minimal_recipe_is_completed_by_defaults_and_the_preset(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert recipe.algorithm.name == "dapo"
    assert recipe.algorithm.clip_high == PRESETS["dapo"]["clip_high"]
    assert recipe.train.learning_rate == 1e-6


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL + "train: {learning_rate: 1e-4}", ["train.epsilon=1e-9"])
    assert recipe.train.learning_rate == 1e-4
    assert recipe.train.epsilon == 1e-9


def test_an_explicit_leaf_wins_over_the_preset_and_a_null_does_not_stand_for_it(tmp_path: Path) -> None:
    text = MINIMAL + "algorithm: {name: grpo, clip_high: 0.4}"
    assert load(tmp_path, text).algorithm.clip_high == 0.4
    assert load(tmp_path, text).algorithm.clip_low == PRESETS["grpo"]["clip_low"]
    assert load(tmp_path, text, ["algorithm.clip_high=0.5"]).algorithm.clip_high == 0.5
    assert "`algorithm.clip_high=null`" in one_cause(lambda: load(tmp_path, text, ["algorithm.clip_high=null"]))


def test_the_resolved_recipe_loads_to_itself(tmp_path: Path) -> None:
    text = MINIMAL + "algorithm: {name: grpo}\nrollout: {kv_memory: 1GiB, stop_token_ids: [1, 2]}"
    recipe = load(tmp_path, text, ["train.learning_rate=3e-7", "data.task.length=5"])
    saved = tmp_path / "recipe.json"
    saved.write_text(recipe.model_dump_json())
    assert load_recipe(saved, []) == recipe


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=2", "train.steps", 2),
        ("rollout.eval.temperature=0.7", "rollout.eval.temperature", 0.7),
        ("data.task.length=5", "data.task", {"length": 5}),
        ("reward.options.x=yes please", "reward.options", {"x": "yes please"}),
        ("reward.options={a: 1, b: text}", "reward.options", {"a": 1, "b": "text"}),
        ("rollout.stop_token_ids=[3, 4]", "rollout.stop_token_ids", (3, 4)),
        ("rollout.kv_memory=2MiB", "rollout.kv_memory", 2 * 2**20),
        ("train.max_grad_norm=null", "train.max_grad_norm", None),
        ("train.compile=true", "train.compile", True),
        ("name=2024-01-01", "name", "2024-01-01"),
        ("run_root=17", "run_root", "17"),
        ("data.system_prompt=Answer: yes = no", "data.system_prompt", "Answer: yes = no"),
        ("data.system_prompt='null'", "data.system_prompt", "null"),
        ("data.system_prompt=[unclosed", "data.system_prompt", "[unclosed"),
        ("train={steps: 7, warmup_steps: 1}", "train.steps", 7),
        ("seed=3", "seed", 3),
    ],
)
def test_overrides(tmp_path: Path, override: str, key: str, value: object) -> None:
    recipe = load(tmp_path, MINIMAL + "train: {steps: 100}", [override])
    found: object = recipe
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_a_mapping_over_a_section_keeps_the_other_leaves_and_the_last_override_wins(tmp_path: Path) -> None:
    text = MINIMAL + "train: {steps: 100, epochs: 3}"
    recipe = load(tmp_path, text, ["train={steps: 7}", "train.steps=8"])
    assert (recipe.train.steps, recipe.train.epochs) == (8, 3)


def test_a_misspelt_key_names_key_section_and_the_nearest_key_wherever_it_lives(tmp_path: Path) -> None:
    text = MINIMAL + "lerning_rate: 1\ntrain: {lerning_rate: 2}\nrollout: {learning_rate: 3}"
    causes = causes_of(lambda: load(tmp_path, text, ["train.lerning_rat=4", "learning_rate=5", "trian.steps=6"]))
    assert len(causes) == 6
    assert all("`train.learning_rate`" in cause for cause in causes if "rning_ra" in cause)
    top, in_train, in_rollout = causes[0], *(c for c in causes if "section" in c and "recipe.yaml" in c)
    assert "`lerning_rate`" in top
    assert "top level" in top
    assert "`train.lerning_rate` in section `train`" in in_train
    assert "`rollout.learning_rate` in section `rollout`" in in_rollout
    assert sum("on the command line" in cause for cause in causes) == 3
    assert any("`trian`" in cause and "`train`" in cause for cause in causes)


def test_a_dotted_key_in_the_file_is_answered_with_itself(tmp_path: Path) -> None:
    cause = one_cause(lambda: load(tmp_path, MINIMAL + "train.learning_rate: 1"))
    assert cause.endswith("did you mean `train.learning_rate`?")


def test_a_key_near_to_nothing_is_answered_with_the_keys_of_its_section(tmp_path: Path) -> None:
    cause = one_cause(lambda: load(tmp_path, MINIMAL + "checkpoint: {zzz: 1}"))
    for leaf in ("checkpoint.every", "checkpoint.keep", "checkpoint.grace"):
        assert f"`{leaf}`" in cause


def test_every_problem_is_in_one_list(tmp_path: Path) -> None:
    text = "name: a/b\ntrain: {steps: 0, epochs: many, compile: 3}\ndata: {max_bad_share: 2}\nmodel: 5"
    causes = causes_of(lambda: load(tmp_path, text, ["rollout.top_p=.nan", "nonsense", "seed=true"]))
    named = [key for key in leaves() if any(cause.startswith((f"`{key}`", f"`{key}=")) for cause in causes)]
    for key in ("name", "seed", "train.steps", "train.epochs", "train.compile", "data.max_bad_share", "data.train"):
        assert key in named
    assert len(causes) == 10


@pytest.mark.parametrize("value", ["5", "null", "[1]", "text"])
@pytest.mark.parametrize("section", [name for name in sections() if name])
def test_a_section_that_is_no_mapping(tmp_path: Path, section: str, value: str) -> None:
    cause = causes_of(lambda: load(tmp_path, MINIMAL, [f"{section}={value}"]))[0]
    assert f"`{section}` is a section" in cause
    assert any(f"`{leaf}`" in cause for leaf in leaves() if leaf.startswith(f"{section}."))


def test_an_override_below_a_section_that_is_no_mapping_is_not_lost_in_silence(tmp_path: Path) -> None:
    assert "`train` is a section" in one_cause(lambda: load(tmp_path, MINIMAL + "train: 5", ["train.steps=2"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("- a\n- b", "holds list"),
        ("just text", "holds str"),
        ("train: {steps: 1", "line 1, column"),
        ("name: a\ntrain:\n  steps: 1\n  steps: 2\n", 'line 4, column 3: not valid YAML: found duplicate key "steps"'),
        ("name: a\n\tb: c\n", "line 2, column 1"),
        ("name: a\n---\nname: b\n", "line 2, column 1"),
        ("name: !strange a", "line 1, column 7"),
    ],
)
def test_broken_files_name_file_and_place(tmp_path: Path, text: str, words: str) -> None:
    cause = one_cause(lambda: load(tmp_path, text))
    assert str(tmp_path / "recipe.yaml") in cause
    assert words in cause
    assert "`name`" in cause or "`name: …`" in cause


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in one_cause(lambda: load_recipe(tmp_path / "no.yaml", []))
    assert "Is a directory" in one_cause(lambda: load_recipe(tmp_path, []))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    assert "byte 6 is not UTF-8" in one_cause(lambda: load_recipe(binary, []))


@pytest.mark.parametrize("override", ["steps", "=3", "train.=3", ".steps=3", "train..steps=1", "train.steps="])
def test_what_is_no_override_is_said_with_an_example(tmp_path: Path, override: str) -> None:
    cause = one_cause(lambda: load(tmp_path, MINIMAL, [override]))
    assert override in cause
    assert "`train.steps=2`" in cause


def test_a_name_without_a_preset_is_not_in_this_version(tmp_path: Path) -> None:
    cause = one_cause(lambda: load(tmp_path, MINIMAL + "algorithm: {name: remax}"))
    if "remax" not in PRESETS:
        assert "not in this version" in cause
        assert all(f"`{name}`" in cause for name in PRESETS)


def test_a_name_the_schema_does_not_know_lists_those_it_does(tmp_path: Path) -> None:
    cause = one_cause(lambda: load(tmp_path, MINIMAL + "algorithm: {name: grop}"))
    assert "`algorithm.name='grop'` is not valid: it takes one of" in cause
    assert "`grpo`" in cause


@pytest.mark.parametrize(("alias", "key"), list(ALIASES.items()))
def test_other_names_work_alone_with_a_note_and_are_refused_beside_the_key(
    tmp_path: Path, alias: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section, _, old = alias.rpartition(".")
    new = key.rpartition(".")[2]
    both = MINIMAL + f"{section}: {{{old}: 3, {new}: 4}}"
    cause = one_cause(lambda: load(tmp_path, both))
    assert cause.endswith(f"keep `{key}`")
    assert capsys.readouterr().err == ""
    for text, overrides in ((MINIMAL + f"{section}: {{{old}: 3}}", []), (MINIMAL, [f"{alias}=3"])):
        old_only = load(tmp_path, text, overrides)
        assert f"write `{key}`" in capsys.readouterr().err
        new_only = load(tmp_path, text.replace(old, new), [item.replace(alias, key) for item in overrides])
        assert capsys.readouterr().err == ""
        assert old_only == new_only
    # An override beats the file, whichever name each uses.
    assert load(tmp_path, MINIMAL + f"{section}: {{{old}: 3}}", [f"{key}=4"]) == load(tmp_path, MINIMAL, [f"{key}=4"])
    assert "on the command line" in one_cause(lambda: load(tmp_path, MINIMAL, [f"{alias}=3", f"{key}=4"]))


def test_aliases_of_a_table_of_ones_own_move_between_sections(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL + "optimizer_rate: 1e-3")
    loaded = load_with_notes(path, aliases={"optimizer_rate": "train.learning_rate"})
    assert loaded.recipe.train.learning_rate == 1e-3
    assert len(loaded.notes) == 1


def fuzzed() -> list[str]:
    """Every key and section set to null, and to values of the wrong kind."""
    keys = [*leaves(), *(name for name in sections() if name)]
    values = ("null", "-1", "1.5", "true", "text", "[]", "{a: 1}", "[null]", ".inf")
    return [f"{key}={value}" for key in keys for value in values]


@pytest.mark.parametrize("key", [*leaves(), *(name for name in sections() if name)])
def test_null_and_wrong_kinds_give_a_valid_recipe_or_an_error_that_names_the_key(tmp_path: Path, key: str) -> None:
    for override in (item for item in fuzzed() if item.startswith(f"{key}=")):
        causes: tuple[str, ...] = ()
        try:
            check_train(load(tmp_path, MINIMAL, [override]))
        except RecipeError as error:
            causes = error.causes
        # `data.train` is missed where `data` as a whole is lost.
        assert not causes or any(key in cause for cause in causes), (override, causes)
        for cause in causes:
            assert_readable(cause)


def assert_readable(cause: str) -> None:
    """Names a key of the schema, no name of ours or of a library's, no list without entries at its end."""
    known = set(re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", cause))
    assert known & (set(leaves()) | set(sections()) - {""}), cause
    assert not re.search(r"\[\]\.?$|: ?$|, $", cause), cause
    assert not re.search(r"https?://|pydantic|Input should|Traceback|\btype=|\b_config\b|Config\b", cause), cause


@pytest.mark.parametrize("name", ["n", "train_batch_size", "adv_estimator", "total_epochs"])
def test_a_key_of_another_framework_is_answered_with_ours(tmp_path: Path, name: str) -> None:
    known = {leaf.key for leaf in leaves().values()}
    assert set(KNOWN_ELSEWHERE.values()) <= known
    cause = one_cause(lambda: load(tmp_path, MINIMAL, [f"rollout.{name}=1"]))
    assert f"`{KNOWN_ELSEWHERE[name]}`" in cause
