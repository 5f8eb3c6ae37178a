"""Bash scripts read without a shell: what each construct stands for, and what only a shell would know."""

from pathlib import Path

import pytest

from plimsoll.errors import RefusedError
from plimsoll.migrate.script import Launch, read_script

SCRIPTS = Path(__file__).parent / "scripts"


def read(tmp_path: Path, text: str, **given: str) -> Launch:
    """The launch in a script."""
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    return read_script(path, given)


def values(tmp_path: Path, before: str, *words: str, **given: str) -> list[str]:
    """What the words become as values of overrides."""
    lines = " \\\n  ".join(f"a.k{number}={word}" for number, word in enumerate(words))
    launch = read(tmp_path, f"{before}\npython3 -m verl.trainer.main_ppo \\\n  {lines}\n", **given)
    return [argument.value.text for argument in launch.arguments]


@pytest.mark.parametrize(
    ("before", "word", "value"),
    [
        ("x=5", "$x", "5"),
        ("x=5", "${x}", "5"),
        ("x=5", "'$x'", "$x"),
        ("x=5", '"<$x>"', "<5>"),
        ("x=5", r"\$x", "$x"),
        ("export x=5", "${x:-7}", "5"),
        ("", "${x:-7}", "7"),
        ("x=", "${x:-7}", "7"),
        ("x=", "${x-7}", ""),
        ("y=8", '"${x:-$((y * 2))}"', "16"),
        ("y=8", "${x:-${z:-$y}}", "8"),
        (": ${x:=9}", "$x", "9"),
        ("x=5", "${x:+set}", "set"),
        ("a=1 b=2", "$a$b", "12"),
        ("a=1; a+=2", "$a", "12"),
        ("a=(p q 'r s')", '"${a[2]}"', "r s"),
        ("p=/models/Qwen3-8B", "${p##*/}", "Qwen3-8B"),
        ("p=run.tar.gz", "${p%.*}", "run.tar"),
        ("p=run.tar.gz", "${p%%.*}", "run"),
        ("p=AbC", "${p,,}", "abc"),
        ("", '\'["console","wandb"]\'', '["console","wandb"]'),
        ("", "['console','wandb']", "[console,wandb]"),
        ("x=1  # a comment", "$x", "1"),
        ("x='a # b'", '"$x"', "a # b"),
        ("if [ 2 -gt 1 ]; then x=then; else x=else; fi", "$x", "then"),
        ('if [[ "$y" == "" ]]; then x=1; fi; y=b; if [ "$y" = a ]; then x=2; elif [ $y = b ]; then x=3; fi', "$x", "3"),
        ("y=c\ncase $y in a | b) x=1 ;; c*) x=2 ;; *) x=3 ;; esac", "$x", "2"),
        ("cat <<EOF\nx=7\nEOF\nx=1", "$x", "1"),
        ("x=1 > /dev/null 2>&1", "$x", "1"),
        ("set -xeuo pipefail && x=4", "$x", "4"),
    ],
)
def test_values(tmp_path: Path, before: str, word: str, value: str) -> None:
    assert values(tmp_path, before, word) == [value]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1024 * 20", 20480),
        ("(p + r) * 2 / sp", 5120),
        ("$p + ${r}", 10240),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("2 + 3 * 4 - 1", 13),
        ("2 ** 10", 1024),
        ("010 + 0x10", 24),
        ("${q:-3} * 2", 6),
    ],
)
def test_arithmetic_is_that_of_bash(tmp_path: Path, expression: str, value: int) -> None:
    assert values(tmp_path, "p=2048 r=8192 sp=4", f"$(( {expression} ))") == [str(value)]


@pytest.mark.parametrize(
    ("before", "word", "part"),
    [
        ("", "run_$(date +%m%d)", "$(date +%m%d)"),
        ("x=`hostname`", "$x", "`hostname`"),
        ("", "$nowhere", "$nowhere"),
        ("", "${nowhere}/data", "${nowhere}"),
        ("", "$((1 / 0))", "$((1 / 0))"),
        ("", "$((nowhere + 1))", "$((nowhere + 1))"),
        ("x=$(nproc)", "$((x * 2))", "$((x * 2))"),
        ("", "${1}", "${1}"),
    ],
)
def test_what_only_a_shell_knows_is_named(tmp_path: Path, before: str, word: str, part: str) -> None:
    launch = read(tmp_path, f"{before}\npython3 -m verl.trainer.main_ppo a.b={word}\n")
    assert launch.arguments[0].value.unknown == (part,)


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"x=$(touch {mark})\ntouch {mark}\n`touch {mark}`\npython3 -m verl.trainer.main_ppo a.b=$(touch {mark})\n"
    read(tmp_path, text)
    assert not mark.exists()


def test_arrays_become_words_of_their_own(tmp_path: Path) -> None:
    text = 'A=(a.b=1  # first\n  a.c="x y"\n)\nA+=(a.d=3)\nNONE=()\nL=(python3)\n'
    launch = read(tmp_path, text + '"${L[@]}" -m verl.trainer.main_ppo "${A[@]}" "${NONE[@]}" "$@"\n')
    assert [(item.key, item.value.text) for item in launch.arguments] == [("a.b", "1"), ("a.c", "x y"), ("a.d", "3")]
    assert launch.notes == ()


def test_a_fallback_that_the_script_names_is_taken_and_said(tmp_path: Path) -> None:
    probe = "D=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n"
    launch = read(tmp_path, probe + 'if [ "$D" = gpu ]; then x=1; fi\npython3 -m verl.trainer.main_ppo a.b=$x\n')
    assert launch.arguments[0].value.text == "1"
    assert len(launch.notes) == 1
    assert "taken as `gpu`" in launch.notes[0]


def test_an_undecided_branch_is_left_out_and_said(tmp_path: Path) -> None:
    launch = read(tmp_path, "x=0\nif nvidia-smi; then x=1; else x=2; fi\npython3 -m verl.trainer.main_ppo a.b=$x\n")
    assert launch.arguments[0].value.text == "0"
    assert launch.notes == ("line 2: the condition cannot be decided here; its branches are left out",)


@pytest.mark.parametrize(
    "launch",
    [
        "python3 -m verl.trainer.main_ppo a.b=1",
        "python -u -m recipe.dapo.main_dapo +a.b=1",
        "ray job submit --working-dir . -- python3 -m verl.trainer.main_dapo a.b=1",
        "ray job submit -- 'python3 -m verl.trainer.main_ppo ++a.b=1'",
        'bash -c "python3 -m verl.trainer.main_ppo a.b=1"',
        "CUDA_VISIBLE_DEVICES=0 nohup python3 verl/trainer/main_ppo.py a.b=1 > log 2>&1 &",
        "main() {\n  python3 -m verl.trainer.main_ppo a.b=1\n}\nmain",
        "for seed in 1 2; do python3 -m verl.trainer.main_ppo a.b=1; done",
    ],
)
def test_launches(tmp_path: Path, launch: str) -> None:
    found = read(tmp_path, f"#!/bin/bash\n{launch}\n")
    assert found.module in ("main_ppo", "main_dapo")
    assert [(item.key, item.value.text) for item in found.arguments] == [("a.b", "1")]


def test_a_plain_list_of_overrides(tmp_path: Path) -> None:
    launch = read(tmp_path, "# saved\na.b=1\na.c=['x','y'] \\\na.d='z'\n")
    assert launch.module is None
    assert [(item.key, item.value.text) for item in launch.arguments] == [("a.b", "1"), ("a.c", "[x,y]"), ("a.d", "z")]


def test_variables_of_the_user_win(tmp_path: Path) -> None:
    assert values(tmp_path, "N=${N:-4}\nM=2", "$N", "$M", N="8", M="3") == ["8", "3"]


def test_an_override_behind_a_broken_continuation_is_said(tmp_path: Path) -> None:
    launch = read(tmp_path, "python3 -m verl.trainer.main_ppo a.b=1 \\ \n  a.c=2\n")
    assert [item.key for item in launch.arguments] == ["a.b"]
    assert any("`a.c=2` stands outside of the launch" in note and "line 2" in note for note in launch.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.trainer.main_ppo a.b='1\n", "line 1: a single quote opens and is never closed"),
        ('x=1\npython3 -m verl.trainer.main_ppo a.b="1\n', "line 2: a double quote opens and is never closed"),
        ("A=(a.b=1\n", "line 1: an array opens"),
        ("x=${y:-1\n", "line 1: `{` opens and is never closed"),
        ("echo hello\n", "no launch of `verl.trainer.main_ppo`"),
        ("python3 -m verl.trainer.fsdp_sft_trainer data.x=1\n", "launches `verl.trainer.fsdp_sft_trainer`"),
    ],
)
def test_refusals(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


def test_a_missing_file_and_a_binary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No such file"):
        read_script(tmp_path / "none.sh", {})
    (tmp_path / "x.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RefusedError, match="not UTF-8"):
        read_script(tmp_path / "x.sh", {})


def test_the_script_of_the_report() -> None:
    launch = read_script(SCRIPTS / "dapo_qwen3_next_80b_4x8.sh", {})
    found = {item.key: item.value for item in launch.arguments}
    assert launch.module == "main_dapo"
    assert found["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"].text == str((2048 + 8192) * 2 // 4)
    assert found["trainer.nnodes"].text == "4"
    assert found["reward_model.overlong_buffer.len"].text == "4096"
    assert found["trainer.experiment_name"].unknown == ("$(date +%m%d)",)
    assert [key for key, value in found.items() if value.unknown] == ["trainer.experiment_name"]
