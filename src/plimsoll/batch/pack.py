"""Groups → mini-batches → micro-batches, on lengths alone. Pure: no tensor, no plane, no randomness.

Rule, in this order:

1. In the loss are samples with a reward, not masked, with at least one response token.
2. Mini-batches (optimizer steps) take whole groups in the order given when there are at least as many groups as
   mini-batches, else whole samples. The cut points are those of the ideal equal cut in samples, rounded to the nearest
   unit, and no mini-batch is left empty while there are enough units.
3. Micro-batches take samples longest first, each into the first one with room under the token budget; a sequence is
   never split, and one that is longer than the budget goes alone. Inside a micro-batch the order is that of the batch.
4. Denominators count the mini-batch as a whole, after every mask.
"""

import itertools
from collections.abc import Sequence

from plimsoll.types import Group, MicroBatch, MiniBatch, Sample, TrainBatch


def in_loss(sample: Sample) -> bool:
    """Whether the sample trains: scored, not masked, at least one response token."""
    return sample.reward is not None and not sample.masked and sample.response_length > 0


def pack(groups: Sequence[Group], *, step: int, token_budget: int, mini_batches: int) -> TrainBatch:
    """The batch of one step.

    `token_budget`: tokens of one micro-batch at most. `mini_batches`: optimizer steps of one pass. A mini-batch with
    nothing to train has no micro-batch and denominators of 0; the update skips and counts it.
    """
    assert token_budget >= 1
    assert mini_batches >= 1
    trained = [[sample for sample in group.samples if in_loss(sample)] for group in groups]
    units = [samples for samples in trained if samples]
    if len(units) < mini_batches:
        units = [[sample] for samples in units for sample in samples]
    return TrainBatch(
        step=step,
        groups=tuple(groups),
        mini_batches=tuple(_mini_batch(part, token_budget) for part in _cut(units, mini_batches)),
    )


def micro_batches(samples: Sequence[Sample], token_budget: int) -> tuple[MicroBatch, ...]:
    """First-fit decreasing: few micro-batches, and the same ones for the same lengths."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: (-samples[i].length, i)):
        length = samples[index].length
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(token_budget - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return tuple(MicroBatch(samples=tuple(samples[i] for i in sorted(members))) for members in bins)


def _mini_batch(units: Sequence[Sequence[Sample]], token_budget: int) -> MiniBatch:
    samples = [sample for unit in units for sample in unit]
    return MiniBatch(
        micro_batches=micro_batches(samples, token_budget),
        num_loss_tokens=sum(sample.response_length for sample in samples),
        num_loss_sequences=len(samples),
    )


def _cut(units: Sequence[Sequence[Sample]], parts: int) -> list[Sequence[Sequence[Sample]]]:
    """`parts` runs of consecutive units with sample counts as equal as whole units allow; empty runs come last."""
    ends = [0]  # ends[i]: samples in the first i units
    for unit in units:
        ends.append(ends[-1] + len(unit))
    filled = min(parts, len(units))
    cuts = [0]
    for part in range(1, filled):
        ideal = ends[-1] * part / filled
        lowest, highest = cuts[-1] + 1, len(units) - (filled - part)
        cuts.append(min(range(lowest, highest + 1), key=lambda i: (abs(ends[i] - ideal), i)))
    cuts += [len(units)] if filled else []
    runs = [units[a:b] for a, b in itertools.pairwise(cuts)]
    return runs + [units[:0]] * (parts - len(runs))
