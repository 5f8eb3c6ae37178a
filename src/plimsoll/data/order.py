"""The order of prompts over epochs, as one stream with a cursor that can be saved.

The stream is the concatenation of epochs 0, 1, 2, …; an epoch's order is a permutation keyed by (seed, epoch). Rules:

- `next_batch()` gives the prompts of one step, `draw(n)` gives n further prompts. Both take prompts that were given
  back first, in the order in which they were given back, then go on in the stream.
- With `drop_last`, an epoch is the first ⌊N / batch_size⌋ · batch_size rows of its order; the remaining N mod
  batch_size rows are left out of this epoch (the next epoch's order leaves out others). Every batch is full. After a
  draw of another size a batch may hold the end of one epoch and the beginning of the next; group ids tell them apart.
- Without `drop_last`, an epoch is all N rows and a batch ends with its epoch: the last, smaller one is a step of its
  own. A draw crosses the border.
- So, whatever is drawn and given back, every row of an epoch comes up exactly once.

Example, N = 5, batch_size = 2, drop_last, order of epoch 0: 3 0 4 1 2. next_batch → 3 0; draw(1) → 4; give_back(0);
next_batch → 0 1. Row 2 is left out of epoch 0, and epoch 1 begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.dataset import Dataset
from plimsoll.errors import DataError
from plimsoll.types import GroupId, Prompt


@dataclass(slots=True, kw_only=True, frozen=True)
class CursorState:
    """Where a stream stands; `dataclasses.asdict` makes it JSON, `from_json` reads it back.

    `num_usable` is kept because the batch size decides which rows of the current epoch are left out by `drop_last`.
    """

    fingerprint: str  # of the dataset
    seed: int
    shuffle: bool
    num_usable: int  # rows of one epoch
    epoch: int
    position: int  # rows of this epoch's order already handed out
    given_back: tuple[tuple[int, int], ...]  # (epoch, row), in the order in which they will be handed out again

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "CursorState":
        """The inverse of `asdict` and `json.dumps`."""
        return CursorState(
            fingerprint=fields["fingerprint"],
            seed=fields["seed"],
            shuffle=fields["shuffle"],
            num_usable=fields["num_usable"],
            epoch=fields["epoch"],
            position=fields["position"],
            given_back=tuple((epoch, row) for epoch, row in fields["given_back"]),
        )


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Indices 0 … num_rows - 1 in the order of this epoch, [num_rows].

    A stable sort by raw Philox words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by
    (seed, epoch). numpy promises the raw words of a bit generator for all versions, but not `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


class PromptStream:
    """Hands out prompts under the rules of this file.

    Raises DataError when an epoch has no batch: no rows, or fewer rows than `batch_size` with `drop_last`.
    """

    def __init__(self, dataset: Dataset, *, batch_size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
        check_fills_batch(dataset, batch_size=batch_size, drop_last=drop_last)
        num_rows = len(dataset.prompts)
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self._num_usable = num_rows // batch_size * batch_size if drop_last else num_rows
        self._by_row = {prompt.row: prompt for prompt in dataset.prompts}
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self._given_back: list[GroupId] = []

    @property
    def batches_per_epoch(self) -> int:
        """Steps that one epoch makes when every batch is used as it comes."""
        return -(-self._num_usable // self._batch_size)

    def next_batch(self) -> list[tuple[GroupId, Prompt]]:
        """The prompts of one step: `batch_size` of them, fewer only at the end of an epoch without `drop_last`."""
        if self._drop_last:
            return self.draw(self._batch_size)
        if self._position == self._num_usable:
            self._next_epoch()
        left = len(self._given_back) + self._num_usable - self._position
        return self.draw(min(self._batch_size, left))

    def draw(self, n: int) -> list[tuple[GroupId, Prompt]]:
        """The next n prompts, over the border of epochs where needed."""
        assert n >= 0, n
        ids, self._given_back = self._given_back[:n], self._given_back[n:]
        while len(ids) < n:
            if self._position == self._num_usable:
                self._next_epoch()
            end = min(self._position + n - len(ids), self._num_usable)
            indices: list[int] = self._order[self._position : end].tolist()
            ids += [GroupId(epoch=self._epoch, row=self._dataset.prompts[index].row) for index in indices]
            self._position = end
        return [(group_id, self._by_row[group_id.row]) for group_id in ids]

    def give_back(self, group_ids: Sequence[GroupId]) -> None:
        """Return prompts that were handed out and not used; they come up again before anything else."""
        pending = set(self._given_back)
        for group_id in group_ids:
            assert group_id not in pending, group_id
            assert group_id.epoch <= self._epoch, group_id
            pending.add(group_id)
            self._given_back.append(group_id)

    def state(self) -> CursorState:
        """The cursor: restored on an equal dataset, the stream goes on exactly here."""
        return CursorState(
            fingerprint=self._dataset.fingerprint,
            seed=self._seed,
            shuffle=self._shuffle,
            num_usable=self._num_usable,
            epoch=self._epoch,
            position=self._position,
            given_back=tuple((group_id.epoch, group_id.row) for group_id in self._given_back),
        )

    def restore(self, state: CursorState) -> None:
        """Go on from a saved cursor.

        Raises DataError, all causes at once, when the saved position means nothing here: other data or another order.
        """
        if causes := self._mismatches(state):
            raise DataError(causes)
        self._epoch = state.epoch
        self._position = state.position
        self._order = self._epoch_order()
        self._given_back = [GroupId(epoch=epoch, row=row) for epoch, row in state.given_back]

    def _mismatches(self, state: CursorState) -> list[str]:
        report = self._dataset.report
        causes: list[str] = []
        if state.fingerprint != self._dataset.fingerprint:
            causes.append(
                f"{report.key}={report.source} ({len(self._dataset.prompts)} usable rows, fingerprint "
                f"{self._dataset.fingerprint[:12]}) is not the data of the saved run (fingerprint "
                f"{state.fingerprint[:12]}), so its position in the data means nothing here: restore the data, the "
                "tokenizer and the data settings, or start a new run (--overwrite, or another name=)"
            )
        elif state.num_usable != self._num_usable:
            causes.append(
                f"one epoch of the saved run has {state.num_usable} rows, here it has {self._num_usable}: "
                "data.prompts_per_step and data.drop_last must stay as they were"
            )
        if state.seed != self._seed:
            causes.append(f"the order of the saved run has seed={state.seed}, here seed={self._seed}: set it back")
        if state.shuffle != self._shuffle:
            causes.append(f"the saved run has data.shuffle={state.shuffle}: set it back")
        return causes

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> NDArray[np.int64]:
        return epoch_order(len(self._dataset.prompts), seed=self._seed, epoch=self._epoch, shuffle=self._shuffle)


def check_fills_batch(dataset: Dataset, *, batch_size: int, drop_last: bool) -> None:
    """Raises DataError when `dataset` has no full batch and `drop_last` leaves the smaller one out."""
    num_rows, key = len(dataset.prompts), dataset.report.key
    if num_rows == 0:
        raise DataError(f"{key}={dataset.report.source} has no usable row")
    if drop_last and num_rows < batch_size:
        raise DataError(
            f"{key}={dataset.report.source} has {num_rows} usable rows, fewer than data.prompts_per_step={batch_size}, "
            "and data.drop_last=true leaves the only, smaller batch out: set data.prompts_per_step to at most "
            f"{num_rows}, or data.drop_last=false"
        )
