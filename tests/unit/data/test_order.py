import json
import random
import subprocess
import sys
from dataclasses import asdict

import pytest

from plimsoll.data.dataset import DataReport, Dataset
from plimsoll.data.order import CursorState, PromptStream, epoch_order
from plimsoll.errors import DataError
from plimsoll.types import GroupId, Prompt

Drawn = list[tuple[int, int]]
"""(epoch, row) of each prompt."""


def dataset(num_rows: int, *, fingerprint: str = "f") -> Dataset:
    """Rows 0, 3, 6, …: as if two of three had been dropped."""
    prompts = tuple(
        Prompt(row=3 * i, token_ids=(i,), text=str(i), messages=({"role": "user", "content": str(i)},))
        for i in range(num_rows)
    )
    report = DataReport(
        source="x.jsonl",
        key="data.train",
        num_read=3 * num_rows,
        num_kept=num_rows,
        dropped={},
        replaced_rows=(),
        truncated_rows=(),
        longest_prompt=1,
        notes=(),
    )
    return Dataset(prompts=prompts, report=report, fingerprint=fingerprint)


def stream(
    num_rows: int,
    batch_size: int,
    *,
    drop_last: bool = True,
    shuffle: bool = True,
    seed: int = 0,
    fingerprint: str = "f",
) -> PromptStream:
    return PromptStream(
        dataset(num_rows, fingerprint=fingerprint),
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )


def drawn(batch: list[tuple[GroupId, Prompt]]) -> Drawn:
    assert all(group_id.row == prompt.row for group_id, prompt in batch)
    return [(group_id.epoch, group_id.row) for group_id, _ in batch]


def expected_epoch(num_rows: int, epoch: int, seed: int = 0) -> Drawn:
    return [(epoch, 3 * int(i)) for i in epoch_order(num_rows, seed=seed, epoch=epoch, shuffle=True)]


def through_json(state: CursorState) -> CursorState:
    return CursorState.from_json(json.loads(json.dumps(asdict(state))))


def test_an_epoch_is_a_permutation_keyed_by_seed_and_epoch() -> None:
    orders = {(seed, e): epoch_order(50, seed=seed, epoch=e, shuffle=True).tolist() for seed in (0, 1) for e in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert epoch_order(50, seed=1, epoch=1, shuffle=True).tolist() == orders[1, 1]
    assert epoch_order(5, seed=1, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_of_a_seed_never_changes() -> None:
    assert epoch_order(8, seed=0, epoch=0, shuffle=True).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, seed=2**64 + 5, epoch=3, shuffle=True).tolist() == [5, 7, 6, 1, 4, 2, 0, 3]


def test_the_smaller_last_batch_is_left_out_or_a_step_of_its_own() -> None:
    dropping, keeping = stream(5, 4), stream(5, 4, drop_last=False)
    assert (dropping.batches_per_epoch, keeping.batches_per_epoch) == (1, 2)
    assert [len(dropping.next_batch()) for _ in range(4)] == [4, 4, 4, 4]
    assert [len(keeping.next_batch()) for _ in range(4)] == [4, 1, 4, 1]
    dropping, keeping = stream(5, 4), stream(5, 4, drop_last=False)
    assert [drawn(dropping.next_batch()) for _ in range(2)] == [expected_epoch(5, 0)[:4], expected_epoch(5, 1)[:4]]
    assert [drawn(keeping.next_batch()) for _ in range(2)] == [expected_epoch(5, 0)[:4], expected_epoch(5, 0)[4:]]


def test_a_dataset_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"3 usable rows.*data\.prompts_per_step=4.*data\.drop_last=false"):
        stream(3, 4)
    with pytest.raises(DataError, match="no usable row"):
        stream(0, 4, drop_last=False)
    assert len(stream(3, 4, drop_last=False).next_batch()) == 3


def test_given_back_prompts_come_first_and_carry_over_the_epoch() -> None:
    for drop_last in (True, False):
        prompts = stream(6, 3, drop_last=drop_last)
        prompts.next_batch()
        second = prompts.next_batch()
        prompts.give_back([second[2][0], second[0][0]])
        third = drawn(prompts.next_batch())
        assert third == [drawn(second)[2], drawn(second)[0], expected_epoch(6, 1)[0]]


def test_a_prompt_can_be_given_back_only_once_and_never_from_a_later_epoch() -> None:
    prompts = stream(6, 3)
    batch = drawn(prompts.next_batch())
    with pytest.raises(AssertionError):
        prompts.give_back([GroupId(epoch=1, row=0)])
    first = GroupId(epoch=0, row=batch[0][1])
    prompts.give_back([first])
    with pytest.raises(AssertionError):
        prompts.give_back([first])


def test_the_list_of_rows_after_a_resume_equals_the_uninterrupted_one() -> None:
    def rows(prompts: PromptStream, steps: int) -> list[Drawn]:
        return [drawn(prompts.next_batch()) for _ in range(steps)]

    whole = rows(stream(20, 4), 10)
    assert sorted(row for batch in whole[:5] for _, row in batch) == [3 * i for i in range(20)]
    for stops in ([1], [5], [7], [2, 3], [1, 5, 7]):
        prompts, seen = stream(20, 4), list[Drawn]()
        for stop in stops:
            seen += rows(prompts, stop - len(seen))
            state = through_json(prompts.state())
            prompts = stream(20, 4)
            prompts.restore(state)
        seen += rows(prompts, 10 - len(seen))
        assert seen == whole, stops


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("trial", range(20))
def test_whatever_is_drawn_given_back_and_resumed_follows_the_brute_force_list(trial: int, drop_last: bool) -> None:
    """The reference is one long list, and a list of given-back prompts before it."""
    rng = random.Random(trial)
    num_rows, batch_size = rng.randint(4, 13), rng.randint(1, 4)
    usable = num_rows // batch_size * batch_size if drop_last else num_rows
    ahead = [pair for epoch in range(200) for pair in expected_epoch(num_rows, epoch, trial)[:usable]]
    back: Drawn = []
    prompts = stream(num_rows, batch_size, drop_last=drop_last, seed=trial)
    used: Drawn = []
    for _ in range(60):
        if rng.random() < 0.5:
            n = rng.randint(0, 6)
            batch = drawn(prompts.draw(n))
        else:
            # Without drop_last a batch ends with the epoch of the next fresh row.
            until_border = next(i for i in range(len(ahead)) if ahead[i][0] != ahead[0][0])
            n = batch_size if drop_last else min(batch_size, len(back) + until_border)
            if not drop_last and 0 < prompts.state().position == usable:
                n = min(batch_size, len(back) + usable)
            batch = drawn(prompts.next_batch())
        expected = (back + ahead)[:n]
        ahead = ahead[max(0, n - len(back)) :]
        back = back[n:]
        assert batch == expected
        returned = [pair for pair in batch if rng.random() < 0.3]
        rng.shuffle(returned)
        prompts.give_back([GroupId(epoch=epoch, row=row) for epoch, row in returned])
        back += returned
        used += [pair for pair in batch if pair not in returned]
        if rng.random() < 0.3:
            state = through_json(prompts.state())
            prompts = stream(num_rows, batch_size, drop_last=drop_last, seed=trial)
            prompts.restore(state)
    assert len(set(used)) == len(used)
    for epoch in range(max(epoch for epoch, _ in used) - 1):
        assert sum(e == epoch for e, _ in used) + sum(e == epoch for e, _ in back) == usable


def test_restoring_on_other_data_or_another_order_is_refused() -> None:
    state = stream(8, 4).state()
    with pytest.raises(DataError, match=r"data\.train=x\.jsonl .* is not the data of the saved run"):
        stream(8, 4, fingerprint="g").restore(state)
    with pytest.raises(DataError, match=r"data\.prompts_per_step and data\.drop_last"):
        stream(8, 3).restore(state)
    with pytest.raises(DataError) as caught:
        stream(8, 4, seed=1, shuffle=False).restore(state)
    assert len(caught.value.causes) == 2
    stream(8, 2).restore(state)  # as many usable rows: the position means the same


def test_the_order_is_made_without_torch() -> None:
    code = "import sys, plimsoll.data.order; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
