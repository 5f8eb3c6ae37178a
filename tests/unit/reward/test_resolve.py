import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from plimsoll.config.reward import RewardConfig, RewardPart, RewardRule
from plimsoll.errors import DataError, RecipeError
from plimsoll.reward.load import BuiltIn, load_function
from plimsoll.reward.resolve import check_function, check_sources, function_kind, needs_answer
from plimsoll.reward.signature import Kind
from tests.unit.reward.requests import write_function


def check(function: str, **options: str | int | float | bool) -> None:
    check_function(RewardConfig(function=function, options=options))


def test_built_in_names_and_their_options() -> None:
    check("exact_match", strip=False)
    check("number")
    with pytest.raises(RecipeError, match="exact_match does not take tolerance; it takes case_sensitive, strip"):
        check("exact_match", tolerance=1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_mach", "Did you mean exact_match"),
        ("rewards.py", "not a built-in name"),
        ("no/such/file.py:score", "there is no file no/such/file.py"),
        ("rewards.py:", "should be"),
        (":score", "should be"),
        ("no_such_package.rewards:score", "No module named 'no_such_package'"),
        ("json:lods", "json has no function lods; did you mean loads"),
    ],
)
def test_what_cannot_be_found_is_refused_by_name(function: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        check(function)
    assert "reward.function" in str(caught.value)


def test_relative_file_with_a_sibling_module_and_a_library_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("LIMIT = 3\n")
    (tmp_path / "types.py").write_text(
        "import helper, enum\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 0\n"
        "def score(prompts, completions, **columns):\n    return [helper.LIMIT] * len(completions)\n"
    )
    assert function_kind(RewardConfig(function="types.py:score")) is Kind.TRL


def test_module_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_function(tmp_path, "def score(data_source, solution_str, ground_truth, extra_info): return 1.0")
    assert function_kind(RewardConfig(function="rewards:score")) is Kind.VERL


def test_last_line_of_a_failing_import_is_reported(tmp_path: Path) -> None:
    spec = write_function(tmp_path, "import os\nraise ValueError('no licence')\n")
    with pytest.raises(RecipeError, match=r"importing .*rewards\.py failed: ValueError: no licence"):
        check(spec)


def test_import_that_kills_its_process_is_reported(tmp_path: Path) -> None:
    spec = write_function(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(RecipeError, match="ended with signal SIGSEGV"):
        check(spec)


def test_import_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.reward.process._START_SECONDS", 0.5)
    spec = write_function(tmp_path, "while True: pass\n")
    with pytest.raises(RecipeError, match=r"took more than 0\.5 s"):
        check_function(RewardConfig(function=spec, timeout=0.1))


def test_check_imports_neither_torch_nor_the_users_module(tmp_path: Path) -> None:
    spec = write_function(tmp_path, "import colorsys\ndef score(response): return 1.0")
    program = (
        "import sys\nfrom plimsoll.config.reward import RewardConfig\n"
        "from plimsoll.reward.resolve import check_function\n"
        "from plimsoll.reward.pool import ScoringPool\n"
        f"check_function(RewardConfig(function={spec!r}))\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'colorsys'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_all_parts_and_sources_are_checked_in_one_process_with_all_causes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = write_function(
        tmp_path, f"open({str(log)!r}, 'a').write('x')\ndef score(completions, *, bonus=0.0): return [0.0]"
    )
    parts = {
        "good": RewardPart(function=spec, options={"bonus": 1.0}),
        "missing": RewardPart(function="no/such/file.py:score"),
        "option": RewardPart(function=spec, options={"malus": 1.0}),
        "any": RewardPart(function="by_source"),
    }
    config = RewardConfig(parts=parts, sources={"x*": RewardRule(function="exact_mach")})
    with pytest.raises(RecipeError) as caught:
        check_function(config)
    told = sorted(cause.partition(": ")[0] for cause in caught.value.causes)
    assert told == ["reward.parts.missing.function", "reward.parts.option.options", "reward.sources.x*.function"]
    assert log.read_text() == "x"
    good = RewardConfig(parts={name: parts[name] for name in ("good", "any")})
    check_function(good)
    assert function_kind(good) is Kind.TRL
    assert needs_answer(good)  # by_source's functions read it
    assert log.read_text() == "xx"  # the second question was answered by the first
    assert not needs_answer(RewardConfig(parts={"good": parts["good"]}))


def test_the_result_of_a_check_is_not_kept_for_another_reward(tmp_path: Path) -> None:
    spec = write_function(tmp_path, "def score(completions): return [0.0]")
    check_function(RewardConfig(function=spec))
    assert function_kind(RewardConfig(function=spec)) is Kind.TRL
    assert function_kind(RewardConfig(function="number")) is Kind.OURS


def test_a_rule_without_its_extra_is_refused_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = BuiltIn(module="plimsoll.reward.rules", function="number", extra="math", requires="no_such_library")
    monkeypatch.setattr("plimsoll.reward.load.BUILT_IN", {"math": rule})
    with pytest.raises(RecipeError, match=r"reward\.function: math needs no_such_library.*'plimsoll-rl\[math\]'"):
        check("math")
    with pytest.raises(RecipeError, match=r"data_source 'aime24'.*math needs no_such_library.*plimsoll-rl\[math\]"):
        check_sources(RewardConfig(function="by_source"), ["aime24"])
    check_sources(RewardConfig(function="number"), ["aime24"])


def test_every_data_source_must_have_a_function_where_it_chooses() -> None:
    config = RewardConfig(function="by_source", sources={"mine/*": RewardRule(function="number")})
    check_sources(config, ["openai/gsm8k", "mine/a"])
    rows = ["openai/gsm8k", "theirs", "", "theirs", *(f"x{i}" for i in range(9))]
    with pytest.raises(DataError) as caught:
        check_sources(config, rows)
    for words in ("11 data_source of 12 rows", "'theirs' (2 rows)", "'' (1 rows)", "and 1 more", "reward.sources"):
        assert words in str(caught.value)
    check_sources(RewardConfig(), rows)  # nothing is chosen
    check_sources(RewardConfig(function="by_source", sources={"*": RewardRule(function="number")}), rows)


@pytest.mark.parametrize("error", [RecipeError(["reward.options: bad regex", "bad flag"]), ValueError("bad regex")])
def test_a_rules_own_check_of_its_options_is_told_under_the_key_of_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    module = ModuleType("checked_rule")

    def check_options(options: dict[str, object]) -> None:
        if options["pattern"] == "(":
            raise error

    def rule(response: str, *, pattern: str) -> float:
        return 0.0

    vars(module).update(check_options=check_options, rule=rule)
    monkeypatch.setitem(sys.modules, "checked_rule", module)
    built_in = {"rule": BuiltIn(module="checked_rule", function="rule", light=True)}
    monkeypatch.setattr("plimsoll.reward.load.BUILT_IN", built_in)
    monkeypatch.setattr("plimsoll.reward.load.NAMES", ("rule",))
    load_function("rule", {"pattern": "x"})
    with pytest.raises(RecipeError) as caught:
        load_function("rule", {"pattern": "("}, setting="reward.parts.a")
    assert all(cause.startswith("reward.parts.a.options: bad ") for cause in caught.value.causes)
