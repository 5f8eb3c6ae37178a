"""Host state of the slots: plain arrays, one entry a slot, so that a step has no Python loop over sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.rollout.noise import stream_key
from plimsoll.types import Completion, FinishReason, Request

_NO_TOKEN = -1


@dataclass(slots=True, kw_only=True, frozen=True)
class Pending:
    """A request and its place in the order of arrival."""

    arrival: int
    request: Request


class SlotTable:
    """What each slot is doing.

    `positions` is the position of the token that goes into the model next: everything before it is in the KV cache. The
    last prompt token is never part of the prefill, so the first sampled token comes out of an ordinary step.
    """

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.num_slots = num_slots
        self.slot_tokens = slot_tokens
        self.active = np.zeros(num_slots, dtype=np.bool_)
        self.tokens = np.zeros((num_slots, slot_tokens), dtype=np.int64)
        self.logprobs = np.zeros((num_slots, slot_tokens), dtype=np.float32)  # at the index of the token
        self.inputs = np.zeros(num_slots, dtype=np.int64)
        self.positions = np.zeros(num_slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.ends = np.zeros(num_slots, dtype=np.int64)  # prompt length + max_tokens
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.stops = np.full((num_slots, 1), _NO_TOKEN, dtype=np.int64)
        self.pending: list[Pending | None] = [None] * num_slots

    def free(self) -> list[int]:
        """Free slots, lowest first."""
        return np.flatnonzero(~self.active).tolist()

    def taken(self) -> list[int]:
        """Active slots, lowest first."""
        return np.flatnonzero(self.active).tolist()

    def assign(self, slot: int, pending: Pending, version: int) -> None:
        """Start a request in a free slot."""
        assert not self.active[slot]
        request, params = pending.request, pending.request.params
        length, stops = len(request.token_ids), params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.num_slots, len(stops)), _NO_TOKEN, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = _NO_TOKEN
        self.stops[slot, : len(stops)] = stops
        self.inputs[slot] = request.token_ids[-1]
        self.positions[slot] = length - 1
        self.prompt_lengths[slot] = length
        self.ends[slot] = length + params.max_tokens
        self.keys[slot] = stream_key(request.seed, version, request.sample_id)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.pending[slot] = pending
        self.active[slot] = True

    def move(self, source: int, destination: int) -> None:
        """Give the sequence of slot `source` to the free slot `destination`."""
        assert self.active[source]
        assert not self.active[destination]
        for column in (
            self.tokens,
            self.logprobs,
            self.inputs,
            self.positions,
            self.prompt_lengths,
            self.ends,
            self.keys,
            self.temperature,
            self.top_k,
            self.top_p,
            self.stops,
        ):
            column[destination] = column[source]
        self.pending[destination] = self.pending[source]
        self.active[destination] = True
        self.release(source)

    def release(self, slot: int) -> Pending:
        """Free a slot; returns what it was doing."""
        pending = self.pending[slot]
        assert pending is not None
        self.pending[slot] = None
        self.active[slot] = False
        # What an idle row computes is thrown away; it only has to be harmless for the model and cheap to sample.
        self.inputs[slot] = self.positions[slot] = self.top_k[slot] = 0
        self.temperature[slot] = self.top_p[slot] = 1
        return pending

    def advance(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> tuple[list[int], list[int]]:
        """Take one sampled token a slot, [rows] of slots below `rows`.

        Returns the slots that stopped and those that reached their length; both are still active.
        """
        rows = len(tokens)
        active = np.flatnonzero(self.active[:rows])
        sampled = tokens[active]
        self.positions[active] += 1
        positions = self.positions[active]
        self.inputs[active] = sampled
        self.tokens[active, positions] = sampled
        self.logprobs[active, positions] = logprobs[active]
        stopped = (sampled[:, None] == self.stops[active]).any(axis=1)
        full = ~stopped & (positions + 1 >= self.ends[active])
        return active[stopped].tolist(), active[full].tolist()

    def completion(self, slot: int, reason: FinishReason, version: int) -> Completion:
        """What the slot's sequence has sampled so far."""
        pending = self.pending[slot]
        assert pending is not None
        span = slice(self.prompt_lengths[slot], self.positions[slot] + 1)
        return Completion(
            sample_id=pending.request.sample_id,
            token_ids=tuple(self.tokens[slot, span].tolist()),
            logprobs=tuple(self.logprobs[slot, span].tolist()),
            finish_reason=reason,
            version=version,
        )


class Prefixes:
    """Which slots hold the keys and values of which prompt, so that the samples of a group share one prefill.

    A slot keeps its prompt after its sequence has ended, until another prompt moves in or the weights change.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[int, ...], set[int]] = {}
        self._held: dict[int, tuple[int, ...]] = {}

    def put(self, slot: int, prefix: tuple[int, ...]) -> None:
        """The slot holds this prefix from now on, and no other."""
        self.drop(slot)
        self._held[slot] = prefix
        self._holders.setdefault(prefix, set()).add(slot)

    def drop(self, slot: int) -> None:
        """The slot holds nothing."""
        prefix = self._held.pop(slot, None)
        if prefix is not None:
            self._holders[prefix].discard(slot)
            if not self._holders[prefix]:
                del self._holders[prefix]

    def held(self, slot: int) -> tuple[int, ...] | None:
        """The prefix in the slot."""
        return self._held.get(slot)

    def holder(self, prefix: tuple[int, ...]) -> int | None:
        """The lowest slot with this prefix."""
        return min(self._holders[prefix]) if prefix in self._holders else None

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._holders.clear()
        self._held.clear()


def batches(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of `lengths` in padded batches of at most `limit` tokens each; a longer one goes alone.

    Shortest first, so that little is padded; ties in the order given.
    """
    out: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if out and (len(out[-1]) + 1) * lengths[index] <= limit:
            out[-1].append(index)
        else:
            out.append([index])
    return out
