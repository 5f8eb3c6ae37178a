import random
import subprocess
import sys

import pytest

from plimsoll.batch.pack import in_loss, pack
from plimsoll.types import Group, GroupId, Prompt, Sample, TrainBatch
from tests.unit.update.support import make_sample


def group(row: int, samples: list[tuple[int, int]], *, reward: float | None = 1.0, masked: bool = False) -> Group:
    group_id = GroupId(epoch=0, row=row)
    members = [make_sample(group_id, i, p, r, reward=reward, masked=masked) for i, (p, r) in enumerate(samples)]
    prompt = Prompt(row=row, token_ids=(), text="", messages=())
    return Group(id=group_id, samples=tuple(members), prompt=prompt)


def random_groups(seed: int, num_groups: int) -> list[Group]:
    source = random.Random(seed)
    return [
        group(row, [(source.randint(1, 9), source.randint(0, 12)) for _ in range(source.randint(1, 5))])
        for row in range(num_groups)
    ]


def ids(batch: TrainBatch) -> list[str]:
    return sorted(str(sample.id) for sample in batch.samples())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mini_batches", [1, 2, 3, 7])
def test_every_trained_sample_is_in_exactly_one_micro_batch_under_the_budget(seed: int, mini_batches: int) -> None:
    groups = random_groups(seed, 5)
    batch = pack(groups, step=3, token_budget=16, mini_batches=mini_batches)
    expected = sorted(str(s.id) for g in groups for s in g.samples if s.response_length > 0)
    assert ids(batch) == expected
    assert len(batch.mini_batches) == mini_batches
    for mini in batch.mini_batches:
        members = [s for micro in mini.micro_batches for s in micro.samples]
        assert mini.num_loss_tokens == sum(s.response_length for s in members)
        assert mini.num_loss_sequences == len(members)
        for micro in mini.micro_batches:
            assert micro.num_tokens <= 16 or len(micro.samples) == 1


def test_unscored_masked_and_empty_samples_are_left_out_but_stay_in_their_group() -> None:
    groups = [
        group(0, [(2, 3), (2, 0)]),
        group(1, [(2, 3)], reward=None),
        group(2, [(2, 3)], masked=True),
    ]
    batch = pack(groups, step=0, token_budget=100, mini_batches=1)
    assert ids(batch) == ["0:0:0"]
    assert batch.groups == tuple(groups)
    assert batch.mini_batches[0].num_loss_tokens == 3
    assert batch.mini_batches[0].num_loss_sequences == 1


def test_mini_batches_take_whole_groups_when_there_are_enough() -> None:
    groups = [group(row, [(2, 2)] * size) for row, size in enumerate([4, 4, 1, 7])]
    batch = pack(groups, step=0, token_budget=100, mini_batches=2)
    rows = [sorted({s.id.group.row for m in mini.micro_batches for s in m.samples}) for mini in batch.mini_batches]
    assert rows == [[0, 1], [2, 3]]


def test_mini_batches_take_whole_samples_when_groups_are_too_few() -> None:
    batch = pack([group(0, [(2, 2)] * 5)], step=0, token_budget=100, mini_batches=3)
    assert [mini.num_loss_sequences for mini in batch.mini_batches] == [2, 1, 2]


def test_a_batch_without_anything_to_train_gives_empty_mini_batches() -> None:
    batch = pack([group(0, [(2, 3)], reward=None)], step=0, token_budget=8, mini_batches=2)
    assert [(m.micro_batches, m.num_loss_tokens, m.num_loss_sequences) for m in batch.mini_batches] == [((), 0, 0)] * 2


def test_fewer_samples_than_mini_batches_leave_the_last_ones_empty() -> None:
    batch = pack([group(0, [(2, 3), (2, 1)])], step=0, token_budget=8, mini_batches=4)
    assert [mini.num_loss_tokens for mini in batch.mini_batches] == [3, 1, 0, 0]


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    batch = pack([group(0, [(1, 1), (20, 5), (1, 1)])], step=0, token_budget=8, mini_batches=1)
    sizes = [micro.num_tokens for micro in batch.mini_batches[0].micro_batches]
    assert sorted(sizes) == [4, 25]


def test_first_fit_decreasing_fills_the_budget() -> None:
    batch = pack([group(0, [(1, n - 1) for n in (2, 5, 6, 3)])], step=0, token_budget=8, mini_batches=1)
    assert [micro.num_tokens for micro in batch.mini_batches[0].micro_batches] == [8, 8]


def test_the_same_lengths_give_the_same_batch() -> None:
    first, second = (pack(random_groups(4, 6), step=1, token_budget=20, mini_batches=3) for _ in range(2))
    assert first == second


def test_in_loss_wants_a_reward_a_response_and_no_mask() -> None:
    def sample(**changes: object) -> Sample:
        values = {"prompt": 1, "response": 1, "reward": 0.0, "masked": False} | changes
        return make_sample(GroupId(epoch=0, row=0), 0, **values)  # type: ignore[arg-type]

    assert in_loss(sample())
    assert not in_loss(sample(reward=None))
    assert not in_loss(sample(masked=True))
    assert not in_loss(sample(response=0))


def test_packing_imports_no_torch() -> None:
    code = "import sys, plimsoll.batch.pack; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
