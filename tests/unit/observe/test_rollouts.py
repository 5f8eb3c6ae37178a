"""Rollout samples: a spread, fixed choice; safe text; files that go with their steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.observe.rollouts import RolloutWriter, choose
from plimsoll.types import DataRef, FinishReason, Group, GroupId, Prompt, Sample, SampleId, Score


def group(row: int, size: int, *, answer: Any = "7", text: str = "ok") -> Group:
    group_id = GroupId(epoch=0, row=row)
    samples: list[Sample] = []
    for index in range(size):
        sample_id = SampleId(group=group_id, index=index)
        samples.append(
            Sample(
                id=sample_id,
                ref=DataRef(key=str(sample_id)),
                prompt_length=3,
                response_length=index + 1,
                finish_reason=FinishReason.STOP,
                version=4,
                score=Score(sample_id=sample_id, value=None if index else 1.0, status="timeout" if index else "ok"),
                reward=None if index else 0.75,
                prompt_text="what?",
                response_text=text,
            )
        )
    prompt = Prompt(row=row, token_ids=(1, 2, 3), text="what?", messages=(), answer=answer)
    return Group(id=group_id, samples=tuple(samples), prompt=prompt)


def picked(sizes: list[int], count: int) -> list[tuple[int, int]]:
    groups = [group(row, size) for row, size in enumerate(sizes)]
    chosen = choose(groups, count)
    assert chosen == choose(groups, count)
    return [(g.id.row, s.id.index) for g, s in chosen]


def test_few_samples_of_many_groups_are_spread_over_the_groups() -> None:
    assert picked([4] * 8, 4) == [(0, 0), (2, 1), (4, 2), (6, 3)]
    assert picked([4] * 3, 2) == [(0, 0), (1, 1)]


def test_many_samples_of_few_groups_take_several_of_each() -> None:
    assert picked([4, 4], 5) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize("sizes", [[1], [3, 1, 0, 5], [2] * 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 100])
def test_the_choice_is_as_large_as_asked_and_names_no_sample_twice(sizes: list[int], count: int) -> None:
    chosen = picked(sizes, count)
    assert len(chosen) == min(count, sum(sizes))
    assert len(set(chosen)) == len(chosen)


def test_a_file_holds_what_a_person_wants_to_see(tmp_path: Path) -> None:
    path = RolloutWriter(tmp_path, 2).write(12, [group(5, 2)])
    assert path == tmp_path / "step_000012.jsonl"
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "step": 12,
        "group": "0:5",
        "sample": 0,
        "prompt": "what?",
        "response": "ok",
        "answer": "7",
        "reward": 0.75,
        "score": 1.0,
        "score_parts": {},
        "score_status": "ok",
        "score_detail": "",
        "prompt_length": 3,
        "response_length": 1,
        "finish_reason": "stop",
        "masked": False,
        "version": 4,
    }
    assert (second["reward"], second["score"], second["score_status"]) == (None, None, "timeout")


def test_hostile_text_is_written_on_one_line_and_can_be_read(tmp_path: Path) -> None:
    text = "a\nb\x00\x1b[2J\ud83d\u2028😀"
    path = RolloutWriter(tmp_path, 1).write(1, [group(0, 1, answer={"gold": float("nan"), "raw": b"x"}, text=text)])
    assert path is not None
    content = path.read_bytes()
    assert content.count(b"\n") == 1
    row = json.loads(content.decode("utf-8"))
    assert row["response"] == text.replace("\ud83d", "\ufffd")
    assert row["answer"] == {"gold": None, "raw": "b'x'"}


def test_nothing_asked_or_nothing_sampled_writes_no_file(tmp_path: Path) -> None:
    assert RolloutWriter(tmp_path, 0).write(1, [group(0, 2)]) is None
    assert RolloutWriter(tmp_path, 4).write(1, []) is None
    assert list(tmp_path.iterdir()) == []


def test_truncate_removes_later_steps_and_leftovers_and_nothing_else(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 1)
    for step in (1, 2, 3, 1_000_000):
        writer.write(step, [group(0, 1)])
    (tmp_path / "step_000002.jsonl.tmp").write_text("torn")
    (tmp_path / "notes.txt").write_text("mine")
    writer.truncate(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step_000001.jsonl", "step_000002.jsonl"]
