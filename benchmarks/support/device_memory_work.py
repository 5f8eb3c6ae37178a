"""The work of `device_memory.py`: the same batches through a plain model with full logits, and through our worker."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.derived import RunPlan
from plimsoll.config.model import ModelConfig
from plimsoll.config.presets import PRESETS
from plimsoll.config.recipe import Recipe
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.train import TrainConfig
from plimsoll.memory.device import device_reader
from plimsoll.memory.enter import Memory
from plimsoll.memory.phases import Phase
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.release import release_device_cache
from plimsoll.memory.schedule import Schedule
from plimsoll.parallel.mesh import build_mesh, close_process_group, ensure_process_group
from plimsoll.plane.local import LocalPlane
from plimsoll.types import (
    DataRef,
    FinishReason,
    Group,
    GroupId,
    MicroBatch,
    MiniBatch,
    Prompt,
    Sample,
    SampleId,
    Score,
    TrainBatch,
)
from plimsoll.update.worker import PolicyWorker

RATE = 1e-6


@dataclass(slots=True, kw_only=True, frozen=True)
class Work:
    """What every variant does."""

    shape: dict[str, int]
    tokens: tuple[int, int, int]  # of a micro-batch; shortest, longest sequence
    device: str
    steps: int
    micro_batches: int  # of each kind in a step

    def config(self) -> Qwen2Config:
        """The model: tied embeddings, as the small ones of this family have them."""
        return Qwen2Config(
            hidden_size=self.shape["hidden"],
            intermediate_size=self.shape["intermediate"],
            num_hidden_layers=self.shape["layers"],
            num_attention_heads=self.shape["heads"],
            num_key_value_heads=self.shape["kv_heads"],
            vocab_size=self.shape["vocab"],
            tie_word_embeddings=True,
            max_position_embeddings=32768,
            bos_token_id=None,
            eos_token_id=None,
        )

    def batches(self) -> Iterator[Tensor]:
        """Token ids [B, L], without end; the same for every variant."""
        generator = torch.Generator().manual_seed(1)
        budget, shortest, longest = self.tokens
        while True:
            length = int(torch.randint(shortest, longest, (1,), generator=generator))
            count = max(1, budget // length)
            yield torch.randint(0, self.shape["vocab"], (count, length), generator=generator)


class Clock:
    """Rows of each phase, and tokens over time after the first step."""

    def __init__(self, work: Work) -> None:
        self.rows: list[dict[str, Any]] = []
        self._cuda = work.device == "cuda"
        self._tokens = 0
        self._start = 0.0

    def step(self, step: int) -> None:
        """A step begins; the clock starts with the second one."""
        if step <= 1:
            self._synchronize()
            self._tokens, self._start = 0, time.perf_counter()

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def throughput(self) -> float:
        self._synchronize()
        return self._tokens / (time.perf_counter() - self._start)

    def before(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def after(self, step: int, phase: str) -> None:
        if not self._cuda:
            self.rows.append({"step": step, "phase": phase, **dict.fromkeys(COUNTERS, 0)})
            return
        self._synchronize()
        stats = torch.cuda.memory_stats()
        self.rows.append({"step": step, "phase": phase, **{key: stats[name] for key, name in COUNTERS.items()}})

    def result(self) -> dict[str, Any]:
        retries = torch.cuda.memory_stats()["num_alloc_retries"] if self._cuda else 0
        return {"rows": self.rows, "throughput": self.throughput(), "alloc_retries": retries}

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


COUNTERS = {
    "allocated": "allocated_bytes.all.current",
    "allocated_peak": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved_peak": "reserved_bytes.all.peak",
}


def run_full(work: Work, folder: Path) -> dict[str, Any]:
    """Full logits, as a plain training loop computes log-probs."""
    device = torch.device(work.device)
    ensure_process_group(device)
    mesh = build_mesh(device, None)
    torch.manual_seed(0)
    with torch.device(work.device):
        model = Qwen2ForCausalLM._from_config(work.config(), attn_implementation="sdpa").float()
    model.gradient_checkpointing_enable()
    model.train()
    compute = torch.bfloat16 if work.device == "cuda" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def logprobs(ids: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - torch.logsumexp(logits, -1)

    clock, batches = Clock(work), work.batches()
    for step in range(work.steps):
        clock.step(step)
        clock.before()
        with torch.no_grad():
            for _ in range(work.micro_batches):
                ids = next(batches).to(device)
                logprobs(ids)
                clock.count(ids.numel())
        clock.after(step, "logprob")
        clock.before()
        for _ in range(work.micro_batches):
            ids = next(batches).to(device)
            found = logprobs(ids)
            (-found.mean() / work.micro_batches).backward()
            clock.count(3 * ids.numel())
        del found, ids
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.after(step, "update")
    result = clock.result()
    close_process_group()
    return result


def run_ours(work: Work, folder: Path) -> dict[str, Any]:
    """Our worker, its phases entered as a run enters them."""
    work.config().save_pretrained(folder)
    plane = LocalPlane()
    worker = PolicyWorker(recipe_of(work, folder), plan_of(work), plane)
    recorder = Recorder(
        folder / "memory.jsonl",
        rank=0,
        device=device_reader(torch.device(work.device)),
        residents=worker.residents,
        interval=0.02,
    )
    release = partial(release_device_cache, worker.device)
    memory = Memory(recorder, residents=worker.residents, schedule=Schedule(), release=release)
    clock, batches = Clock(work), work.batches()
    for step in range(work.steps):
        clock.step(step)
        recorder.begin_step(step)
        scored = batch_of(work, batches, plane, step)
        with memory.enter(Phase.LOGPROB):
            worker.score(scored, old=True, reference=False)
        clock.count(sum(sample.length for sample in scored.samples()))
        trained = batch_of(work, batches, plane, step)
        with memory.enter(Phase.UPDATE):
            worker.update(trained)
        clock.count(3 * sum(sample.length for sample in trained.samples()))
    result = clock.result()
    recorder.close()
    rows = [json.loads(line) for line in (folder / "memory.jsonl").read_text(encoding="utf-8").splitlines()]
    result["rows"] = [
        {"step": row["step"], "phase": row["phase"], **{key: row[f"device_{key}"] or 0 for key in COUNTERS}}
        for row in rows
    ]
    result["ledger"] = rows[-2:]
    worker.close()
    close_process_group()
    return result


def recipe_of(work: Work, folder: Path) -> Recipe:
    return Recipe(
        name="device-memory",
        model=ModelConfig(config=str(folder), init="random"),
        data=DataConfig(train="unused.jsonl"),
        rollout=RolloutConfig(max_response_tokens=work.tokens[2]),
        algorithm=AlgorithmConfig(**{"name": "dapo", **PRESETS["dapo"]}),
        train=TrainConfig(learning_rate=RATE),
    )


def plan_of(work: Work) -> RunPlan:
    cuda = work.device == "cuda"
    return RunPlan(
        steps=work.steps,
        optimizer_steps=work.steps,
        device="cuda" if cuda else "cpu",
        threads=torch.get_num_threads(),
        compute_dtype="bfloat16" if cuda else "float32",
        packing="packed" if cuda else "padded",
        activation_checkpointing="full",
        token_budget=work.tokens[0],
        logprob_chunk=2048,
        num_slots=1,
        slot_tokens=1,
        kv_bytes=0,
        optimizer_state="device",
        reference_placement="device",
        memory=None,
        reference=None,
        stop_token_ids=(),
    )


def batch_of(work: Work, batches: Iterator[Tensor], plane: LocalPlane, step: int) -> TrainBatch:
    """The next `micro_batches` of the batches; each row a sample whose tokens after the first are sampled ones."""
    micro: list[MicroBatch] = []
    groups: list[Group] = []
    for number in range(work.micro_batches):
        ids = next(batches)
        group = GroupId(epoch=step, row=number)
        samples = tuple(put_row(plane, group, index, row) for index, row in enumerate(ids))
        groups.append(Group(id=group, samples=samples, prompt=Prompt(row=number, token_ids=(0,), text="", messages=())))
        micro.append(MicroBatch(samples=samples))
    count = [sample for part in micro for sample in part.samples]
    mini = MiniBatch(
        micro_batches=tuple(micro),
        num_loss_tokens=sum(sample.response_length for sample in count),
        num_loss_sequences=len(count),
    )
    return TrainBatch(step=step, groups=tuple(groups), mini_batches=(mini,))


def put_row(plane: LocalPlane, group: GroupId, index: int, ids: Tensor) -> Sample:
    sample_id = SampleId(group=group, index=index)
    ref = DataRef(key=str(sample_id))
    sampled = torch.arange(len(ids)) > 0
    plane.drop([ref])
    plane.put(
        ref,
        token_ids=ids,
        sampled=sampled,
        rollout_logprobs=torch.where(sampled, -12.0, 0.0),
        advantages=torch.where(sampled, 1.0, 0.0),
    )
    return Sample(
        id=sample_id,
        ref=ref,
        prompt_length=1,
        response_length=len(ids) - 1,
        finish_reason=FinishReason.LENGTH,
        version=-1,
        score=Score(sample_id=sample_id, value=1.0, status="ok"),
        reward=1.0,
    )
