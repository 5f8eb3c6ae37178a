import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RecipeError
from plimsoll.reward.resolve import check_function, function_kind
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
