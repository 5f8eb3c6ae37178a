"""The native engine: any causal model of transformers with full or sliding attention, in fixed slots.

What it consumes: requests, in order. What it produces: completions, slot by slot. What it waits for: one transfer of
sampled tokens from the device a step. A step is

    admit (queue order, lowest free slot; prompts are prefilled, or copied from a slot that holds the same one)
    → one forward pass over all slots up to the highest active one
    → one draw a row (sampling.py) with noise that belongs to the token (noise.py)
    → retire what stopped or is full

Left out on purpose: paging (a slot has room for the longest sequence), CUDA graphs, beams. On GPUs it is for small
models, tests and debugging.
"""

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError, RunError
from plimsoll.rollout import attention
from plimsoll.rollout.kv import LayerCache, kv_bytes_per_token, max_positions, num_layers
from plimsoll.rollout.noise import uniforms
from plimsoll.rollout.sampling import RowParams, sample
from plimsoll.rollout.slots import Pending, Prefixes, SlotTable, batches
from plimsoll.types import Completion, EnginePart, FinishReason, Request, SampleId

_LENGTH_STEP = 16
"""Attention looks at a multiple of this many cached tokens: few shapes, aligned for fused kernels."""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class NativeEngine:
    """The Engine protocol over a model of transformers.

    model: used as it is, parameters neither copied nor changed. It must be the engine's own module object, as its
        attention implementation and its mode are set here; its parameters may alias the policy's.
    num_slots: sequences at once; slot_tokens: prompt + response of one sequence at most; prefill_tokens: padded prompt
        tokens that go through the model at once (one longer prompt goes alone).

    RefusedError for a family whose attention the slots cannot compute. `version` is 0 until `set_version`.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, slot_tokens: int, prefill_tokens: int) -> None:
        assert min(num_slots, slot_tokens - 1, prefill_tokens) > 0
        self._model = model
        self._device = model.device
        self._slot_tokens = slot_tokens
        self._prefill_tokens = prefill_tokens
        self._layers = _build_cache(model, num_slots, slot_tokens)
        self._slots = SlotTable(num_slots, slot_tokens)
        self._prefixes = Prefixes()
        self._queue: deque[Pending] = deque()
        self._ids: set[SampleId] = set()
        self._arrivals = 0
        self._version = 0
        self._awake = True  # the KV cache has memory
        self._params: RowParams | None = None  # of rows as they are; None: rows have changed

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    @property
    def idle(self) -> bool:
        """True when nothing is queued or active."""
        return not self._ids

    @property
    def kv_bytes(self) -> int:
        """Device bytes of the KV cache now; 0 while it sleeps."""
        return sum(layer.num_bytes for layer in self._layers.values())

    def awake(self, part: EnginePart) -> bool:
        """Whether a part is on the device. The weights are not the engine's own: whoever lends them moves them."""
        return part == "weights" or self._awake

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Free the KV cache; the prompts that it held are forgotten. The engine must be idle and the cache awake."""
        self._check_parts(parts, awake=True)
        assert self.idle, "an engine with unfinished requests was put to sleep"
        self._prefixes.clear()
        self._awake = False
        for layer in self._layers.values():
            layer.vacate()

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Take memory for the KV cache again, all of it or, when the device has no room, none."""
        self._check_parts(parts, awake=False)
        try:
            for layer in self._layers.values():
                layer.fill()
        except BaseException:
            for layer in self._layers.values():
                layer.vacate()
            raise
        self._awake = True

    def _check_parts(self, parts: Sequence[EnginePart], *, awake: bool) -> None:
        assert tuple(parts) == ("kv_cache",), f"the KV cache is all that this engine has, not {list(parts)}"
        assert self._awake == awake, f"the KV cache is {'awake' if self._awake else 'asleep'} already"

    def set_version(self, version: int) -> None:
        """The weights have changed. Kept prompts are forgotten, as their keys and values belong to the old weights.

        Unfinished requests start again from their prompt, first in the queue: a completion is of one version from its
        first token to its last. Who wants to keep what they have sampled takes it back by `abort` before.
        """
        restart = [self._release(slot) for slot in self._slots.taken()]
        self._queue.extendleft(sorted(restart, key=lambda pending: pending.arrival, reverse=True))
        self._prefixes.clear()
        self._version = version

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; RefusedError when one does not fit into a slot."""
        for request in requests:
            length, room = len(request.token_ids), request.params.max_tokens
            if length < 1 or room < 1:
                raise RefusedError(
                    f"sample {request.sample_id}: {length} prompt tokens and {room} response tokens; both must be at"
                    " least 1 (data.train, rollout.max_response_tokens)"
                )
            if length + room > self._slot_tokens:
                raise RefusedError(
                    f"sample {request.sample_id}: {length} prompt tokens + {room} response tokens do not fit into a"
                    f" slot of {self._slot_tokens}; lower data.max_prompt_tokens or rollout.max_response_tokens"
                )
        new = {request.sample_id for request in requests}
        assert len(new) == len(requests), "two requests with one sample id"
        assert not new & self._ids, "a sample id is in use"
        self._ids |= new
        for request in requests:
            self._queue.append(Pending(arrival=self._arrivals, request=request))
            self._arrivals += 1

    def step(self) -> list[Completion]:
        """Advance every active sequence by one token; what finished comes in the order of its slots."""
        if self.idle:
            return []
        assert self._awake, "a step while the KV cache is asleep"
        with torch.inference_mode():
            self._admit()
            self._compact()
            tokens, logprobs = self._decode()
        self._check(tokens, logprobs)
        stopped, full = self._slots.advance(tokens, logprobs)
        finished = [(slot, FinishReason.STOP) for slot in stopped] + [(slot, FinishReason.LENGTH) for slot in full]
        completions = [self._retire(slot, reason) for slot, reason in sorted(finished)]
        if self.idle:
            # Kept prompts would carry the rounding of this round's batch shapes into the next round, and a resumed run
            # has no last round.
            self._prefixes.clear()
        return completions

    def abort(self, sample_ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """Take requests back (None: all): active ones by slot, then queued ones, whose output is empty.

        Ids that are not in the engine are ignored: they may have finished in the meantime.
        """
        wanted = set(self._ids if sample_ids is None else sample_ids) & self._ids
        out: list[Completion] = []
        for slot in self._slots.taken():
            completion = self._slots.completion(slot, FinishReason.ABORT, self._version)
            if completion.sample_id in wanted:
                out.append(completion)
                self._forget(self._release(slot))
        queued = [pending for pending in self._queue if pending.request.sample_id in wanted]
        for pending in queued:
            out.append(
                Completion(
                    sample_id=pending.request.sample_id,
                    token_ids=(),
                    logprobs=(),
                    finish_reason=FinishReason.ABORT,
                    version=self._version,
                )
            )
            self._forget(pending)
        self._queue = deque(pending for pending in self._queue if pending.request.sample_id not in wanted)
        return out

    def _admit(self) -> None:
        free = self._slots.free()[: len(self._queue)]
        if not free:
            return
        admitted = [(slot, self._queue.popleft()) for slot in free]
        prefixes = {slot: pending.request.token_ids[:-1] for slot, pending in admitted}
        for slot, pending in admitted:
            self._slots.assign(slot, pending, self._version)
            if self._prefixes.held(slot) != prefixes[slot]:
                self._prefixes.drop(slot)
        # From here on a holder is a slot that keeps its prompt, so copies never read what this admission overwrites.
        prefill: list[int] = []
        copies: list[tuple[int, int]] = []
        for slot, prefix in prefixes.items():
            if not prefix or self._prefixes.held(slot) == prefix:
                continue
            source = self._prefixes.holder(prefix)
            if source is None:
                prefill.append(slot)
                self._prefixes.put(slot, prefix)
            else:
                copies.append((source, slot))
        for _, slot in copies:  # only now: all copies are one operation, so none may read what another writes
            self._prefixes.put(slot, prefixes[slot])
        self._prefill(prefill, prefixes)
        self._copy(copies, max((len(prefixes[slot]) for _, slot in copies), default=0))
        self._params = None

    def _prefill(self, slots: Sequence[int], prefixes: dict[int, tuple[int, ...]]) -> None:
        for batch in batches([len(prefixes[slot]) for slot in slots], self._prefill_tokens):
            rows = [prefixes[slots[index]] for index in batch]
            length = max(map(len, rows))
            ids = np.zeros((len(rows), length), dtype=np.int64)
            for row, prefix in enumerate(rows):
                ids[row, : len(prefix)] = prefix
            input_ids = self._tensor(ids)
            call = attention.PrefillCall(self._layers, self._tensor([slots[index] for index in batch]))
            with attention.calling(call):
                self._model.base_model(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),  # see _decode
                    position_ids=torch.arange(length, device=self._device).expand(len(rows), -1),
                    use_cache=False,
                )

    def _compact(self) -> None:
        """When nothing waits and at least half of the rows are idle, move the highest sequences down.

        The tail of a rollout, a few long sequences, would otherwise pay for all rows up to the highest one.
        """
        count = int(self._slots.active.sum())
        if self._queue or self._rows() < 2 * count:
            return
        high = [slot for slot in self._slots.taken() if slot >= count]
        moves = list(zip(high, self._slots.free(), strict=False))
        self._copy(moves, int(self._slots.positions.max()))
        for source, destination in moves:
            self._slots.move(source, destination)
            self._prefixes.drop(destination)
        self._params = None

    def _decode(self) -> tuple[np.ndarray, np.ndarray]:
        """One token for each row: ids [rows] int64, log-probabilities [rows] float32."""
        table, rows = self._slots, self._rows()
        active, positions = table.active[:rows], table.positions[:rows]
        # An idle row writes behind everything that a kept prompt can reach.
        writes = np.where(active, positions, self._slot_tokens - 1)
        tokens, positions_, writes_ = self._tensor(np.stack([table.inputs[:rows], positions, writes]))
        uniform = self._tensor(uniforms(table.keys[:rows], positions + 1))
        if self._params is None or len(self._params.greedy) != rows:
            self._params = RowParams.build(
                table.temperature[:rows], table.top_k[:rows], table.top_p[:rows], self._device
            )
        length = -(-(int(positions.max()) + 1) // _LENGTH_STEP) * _LENGTH_STEP
        call = attention.DecodeCall(
            self._layers,
            positions=positions_,
            writes=writes_,
            length=min(length, self._slot_tokens),
            slot_tokens=self._slot_tokens,
        )
        with attention.calling(call):
            # The mask of ones says nothing. Without it transformers compares positions to look for packed rows, and
            # ids to look for padding, and on a GPU both wait for the device.
            output = self._model(
                input_ids=tokens[:, None],
                attention_mask=torch.ones_like(tokens)[:, None],
                position_ids=positions_[:, None],
                use_cache=False,
            )
        sampled, logprobs = sample(output.logits[:, -1], self._params, uniform)
        host = torch.stack([sampled.double(), logprobs.double()]).cpu().numpy()  # the one transfer of a step
        return host[0].astype(np.int64), host[1].astype(np.float32)

    def _check(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        bad = np.flatnonzero(np.isnan(logprobs) & self._slots.active[: len(tokens)])
        if len(bad):
            pending = self._slots.pending[int(bad[0])]
            assert pending is not None
            raise RunError(
                f"sample {pending.request.sample_id}: the model's logits are not finite at policy version"
                f" {self._version}; the weights are broken, or the compute dtype overflows (model.compute_dtype)"
            )

    def _rows(self) -> int:
        return self._slots.taken()[-1] + 1

    def _copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        if pairs and length:
            sources, destinations = self._tensor(np.array(pairs, dtype=np.int64).T)
            for layer in self._layers.values():
                layer.copy(sources, destinations, length)

    def _tensor(self, values: np.ndarray | Sequence[int]) -> Tensor:
        # Not waiting is safe: memory that is not pinned has been read when the call returns.
        return torch.as_tensor(values).to(self._device, non_blocking=True)

    def _retire(self, slot: int, reason: FinishReason) -> Completion:
        completion = self._slots.completion(slot, reason, self._version)
        self._forget(self._release(slot))
        return completion

    def _release(self, slot: int) -> Pending:
        self._params = None
        return self._slots.release(slot)

    def _forget(self, pending: Pending) -> None:
        self._ids.discard(pending.request.sample_id)


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a config of its own.

    Models that are built from one config object share it, and with it the name of the attention implementation: ours
    would appear in the policy too.
    """
    mine = copy.deepcopy(model.config)
    pairs = [(model.config, mine), (model.config.get_text_config(), mine.get_text_config())]
    for module in model.modules():
        for shared, own in pairs:
            if vars(module).get("config") is shared:
                module.config = own  # pyright: ignore[reportArgumentType] # torch's type is for submodules


def _build_cache(model: PreTrainedModel, num_slots: int, slot_tokens: int) -> dict[torch.nn.Module, LayerCache]:
    """Look at the model with two tokens, refuse what the slots cannot compute, allocate."""
    name = type(model).__name__
    layer_types = set(model.config.get_text_config().to_dict().get("layer_types") or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise RefusedError(
            f"rollout.engine=native cannot run {name}: its layers of type {', '.join(unknown)} need another cache;"
            " choose another rollout.engine or another model"
        )
    positions = max_positions(model.config)
    if positions is not None and slot_tokens > positions:
        raise RefusedError(
            f"a sequence of {slot_tokens} tokens is longer than the {positions} positions that {name} knows;"
            " lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    model.eval()
    _own_config(model)
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    probe = attention.ProbeCall()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.inference_mode(), attention.calling(probe):
        model.base_model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
        )
    layers, expected = probe.layers, num_layers(model.config)
    if len(layers) != expected or model.base_model is model:
        raise RefusedError(
            f"rollout.engine=native cannot run {name}: {len(layers)} of its {expected} layers compute attention in the"
            " way that transformers lets others replace; choose another rollout.engine or another model"
        )
    with torch.inference_mode(False):
        caches = {m: LayerCache(s, num_slots=num_slots, slot_tokens=slot_tokens) for m, s in layers.items()}
    allocated = sum(cache.num_bytes for cache in caches.values())
    planned = num_slots * slot_tokens * kv_bytes_per_token(model.config, model.dtype)
    if allocated != planned:
        raise RefusedError(
            f"rollout.engine=native cannot run {name}: its layers store {allocated} bytes of keys and values, not the"
            f" {planned} that its config.json says; choose another rollout.engine or another model"
        )
    return caches
