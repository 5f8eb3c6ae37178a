"""Recipes, batches and plane columns for tests of the trainer."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from plimsoll.batch.pack import pack
from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.derived import RunPlan
from plimsoll.config.model import ModelConfig
from plimsoll.config.presets import PRESETS
from plimsoll.config.recipe import Recipe
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.train import TrainConfig
from plimsoll.parallel.tensors import full
from plimsoll.plane.local import LocalPlane
from plimsoll.types import DataRef, FinishReason, Group, GroupId, Prompt, Sample, SampleId, Score, TrainBatch
from plimsoll.update.state import StateFolders
from plimsoll.update.worker import Counters, PolicyWorker

MAX_RESPONSE = 9


def make_recipe(
    folder: Path,
    *,
    algorithm: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    temperature: float = 0.7,
) -> Recipe:
    models: dict[str, Any] = {"path": str(folder), "dtype": "float64", "packing": "padded"}
    algorithms: dict[str, Any] = {"name": "dapo", **PRESETS["dapo"]}
    training: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": None}
    return Recipe(
        name="test",
        model=ModelConfig(**(models | (model or {}))),
        data=DataConfig(train="unused.jsonl"),
        rollout=RolloutConfig(temperature=temperature, max_response_tokens=MAX_RESPONSE),
        algorithm=AlgorithmConfig(**(algorithms | (algorithm or {}))),
        train=TrainConfig(**(training | (train or {}))),
    )


def make_plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "steps": 4,
        "optimizer_steps": 4,
        "device": "cpu",
        "threads": 1,
        "compute_dtype": "float64",
        "packing": "padded",
        "activation_checkpointing": "none",
        "token_budget": 64,
        "logprob_chunk": 5,
        "num_slots": 1,
        "slot_tokens": 1,
        "kv_bytes": 1,
        "optimizer_state": "device",
        "reference_placement": "device",
        "memory": None,
        "reference": None,
        "stop_token_ids": (2,),
    }
    return RunPlan(**(values | changes))


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def full_moments(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of moments (gathered) and step counts, by the names that a checkpoint has. Collective on several ranks."""
    steps = worker.optimizer.steps_by_name()
    found: dict[str, torch.Tensor] = {f"{name}.step": torch.tensor(count) for name, count in steps.items()}
    for name, moments in worker.optimizer.moments().items():
        found |= {f"{name}.{moment}": full(tensor).clone() for moment, tensor in moments.items()}
    return found


def write_state(worker: PolicyWorker, folder: Path, *, budget_bytes: int = 1 << 20) -> Path:
    """Weights and moments as in a checkpoint, by all ranks; `folder` must be new. Collective on several ranks."""
    folders = StateFolders(model=folder / "model", optimizer=folder / "optimizer", tokenizer=folder)
    if worker.control.rank == 0:
        for made in (folder, folders.model, folders.optimizer):
            made.mkdir()
    worker.control.barrier()
    writer = worker.control.together(lambda: worker.state_writer(folders, budget_bytes=budget_bytes))
    writer.run()
    worker.control.together(writer.check)
    return folder


def load_state(worker: PolicyWorker, folder: Path, counters: Counters) -> None:
    """What `write_state` wrote. Collective on several ranks."""
    worker.load_state(sorted((folder / "optimizer").glob("*.safetensors")), counters, model=folder / "model")


def make_groups(
    plane: LocalPlane, *, num_groups: int = 3, samples: int = 4, seed: int = 0, vocab: int = 64
) -> list[Group]:
    """Random samples whose engine log-probs are near -log(vocab); rewards 0 and 1, never all equal in a group."""
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    groups: list[Group] = []
    for row in range(num_groups):
        group_id = GroupId(epoch=seed, row=row)  # other seeds are other samples
        prompt = tuple(randint(3, vocab) for _ in range(randint(2, 7)))
        members: list[Sample] = []
        for index in range(samples):
            response = [randint(3, vocab) for _ in range(randint(1, MAX_RESPONSE + 1))]
            length = len(prompt) + len(response)
            sampled = torch.arange(length) >= len(prompt)
            noise = torch.randn(length, generator=generator) * 0.4
            members.append(make_sample(group_id, index, len(prompt), len(response), reward=float(index % 2)))
            plane.put(
                members[-1].ref,
                token_ids=torch.tensor([*prompt, *response]),
                sampled=sampled,
                rollout_logprobs=torch.where(sampled, noise - 4.2, 0.0),
            )
        groups.append(
            Group(
                id=group_id,
                samples=tuple(members),
                prompt=Prompt(row=row, token_ids=prompt, text="", messages=()),
            )
        )
    return groups


def make_sample(
    group: GroupId, index: int, prompt: int, response: int, *, reward: float | None = 1.0, masked: bool = False
) -> Sample:
    sample_id = SampleId(group=group, index=index)
    return Sample(
        id=sample_id,
        ref=DataRef(key=str(sample_id)),
        prompt_length=prompt,
        response_length=response,
        finish_reason=FinishReason.STOP,
        version=0,
        score=Score(sample_id=sample_id, value=reward, status="ok" if reward is not None else "unscored"),
        reward=reward,
        masked=masked,
    )


def make_batch(groups: list[Group], *, token_budget: int = 64, mini_batches: int = 1) -> TrainBatch:
    return pack(groups, step=0, token_budget=token_budget, mini_batches=mini_batches)
