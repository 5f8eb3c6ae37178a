"""Runs of transformers.Trainer are recorded, with phases, what the model holds, and curves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from plimsoll.memory.callback import MemoryCallback
from plimsoll.observe.report.read import read_run
from tests import tiny
from tests.processes import open_files
from tests.unit.data.words import word_tokenizer


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dataset(count: int) -> list[dict[str, Any]]:
    ids = list(range(3, 19))
    return [{"input_ids": ids, "labels": ids} for _ in range(count)]


class Generating(Trainer):
    """As TRL's online trainers do: the batch of a step is sampled first."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
        model.train()
        return super().training_step(model, inputs, *args, **kwargs)


def trainer_of(
    folder: Path, memory: MemoryCallback, model: PreTrainedModel, kind: type[Trainer] = Trainer, **settings: Any
) -> Trainer:
    common: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    arguments = TrainingArguments(output_dir=str(folder / "out"), **(common | settings))
    return kind(model=model, args=arguments, train_dataset=dataset(12), eval_dataset=dataset(2), callbacks=[memory])


def phases(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["phase"]) for row in rows(folder / "memory.jsonl")]


def test_a_trainers_run_is_recorded(tmp_path: Path) -> None:
    memory = MemoryCallback(tmp_path)
    model = tiny.qwen2()
    trainer = trainer_of(
        tmp_path,
        memory,
        model,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
    )
    with memory.watch():
        trainer.train()
    step = ["update/gradients", "update/step"]
    assert phases(tmp_path) == [
        (0, "load"),
        (0, "between"),
        *[(1, phase) for phase in (*step, "between")],
        *[(2, phase) for phase in (*step, "between")],
        *[(3, phase) for phase in (*step, "eval", "save", "between")],
    ]
    found = {(row["step"], row["phase"]): row for row in rows(tmp_path / "memory.jsonl")}
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert found[0, "load"]["residents"] == {"parameters": size, "gradients": 0, "optimizer_state": 0}
    assert found[1, "update/gradients"]["residents"]["gradients"] == size
    assert 2 * size <= found[1, "update/step"]["residents"]["optimizer_state"] <= 2.1 * size
    assert found[3, "between"]["residents"]["gradients"] == 0
    assert not any(row["failed"] for row in found.values())


def test_curves_are_kept_and_the_report_reads_the_folder(tmp_path: Path) -> None:
    memory = MemoryCallback(tmp_path)
    trainer_of(tmp_path, memory, tiny.qwen2(), eval_strategy="steps", eval_steps=3).train()
    found = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert [("loss" in row or "train_loss" in row, "eval_loss" in row) for row in found] == [
        (True, False),
        (True, False),
        (True, True),
    ]
    report = read_run(tmp_path)
    assert report.num_rows == 3
    assert len(report.ledger) == 1
    assert open_files(tmp_path) == []


def test_what_the_model_generates_within_a_step_is_a_phase(tmp_path: Path) -> None:
    memory = MemoryCallback(tmp_path)
    model = tiny.qwen2()
    trainer_of(tmp_path, memory, model, Generating, max_steps=1).train()
    assert phases(tmp_path)[2:] == [
        (1, "update/gradients"),
        (1, "rollout"),
        (1, "update/gradients"),
        (1, "update/step"),
        (1, "between"),
    ]
    assert "generate" not in vars(model)  # the class's own again


def test_another_generator_is_recorded_only_among_the_gradients(tmp_path: Path) -> None:
    memory = MemoryCallback(tmp_path)
    calls: list[str] = []
    generate = memory.recorded(calls.append, "sampling")

    class Asking(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            generate("inside")
            return super().training_step(model, inputs, *args, **kwargs)

    generate("before")
    trainer_of(tmp_path, memory, tiny.qwen2(), Asking, max_steps=1).train()
    generate("after")
    assert calls == ["before", "inside", "after"]
    assert [phase for _, phase in phases(tmp_path)].count("sampling") == 1


def test_a_run_that_fails_leaves_the_table_and_no_open_file(tmp_path: Path) -> None:
    class Full(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    memory = MemoryCallback(tmp_path)
    model = tiny.qwen2()
    trainer = trainer_of(tmp_path, memory, model, Full)
    with pytest.raises(torch.OutOfMemoryError) as caught, memory.watch():
        trainer.train()
    (text,) = caught.value.__notes__
    assert "update/gradients phase of step 1" in text
    assert "parameters" in text
    last = rows(tmp_path / "memory.jsonl")[-1]
    assert (last["phase"], last["failed"]) == ("update/gradients", True)
    assert open_files(tmp_path) == []
    assert "generate" not in vars(model)


def test_a_generate_that_somebody_else_has_set_is_set_again(tmp_path: Path) -> None:
    model, asked = tiny.qwen2(), list[int]()
    own = model.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return own(*args, **kwargs)

    model.generate = counted
    trainer_of(tmp_path, MemoryCallback(tmp_path), model, Generating, max_steps=1).train()
    assert asked == [1]
    assert model.generate is counted


def test_a_second_training_goes_on_in_the_same_files(tmp_path: Path) -> None:
    memory = MemoryCallback(tmp_path)
    trainer = trainer_of(tmp_path, memory, tiny.qwen2(), max_steps=1)
    trainer.train()
    trainer.evaluate()  # outside of a training: not recorded
    trainer.train()
    assert [phase for _, phase in phases(tmp_path)].count("update/step") == 2


@pytest.mark.filterwarnings("default")  # TRL's own, of other libraries' deprecations
@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_trainers_of_trl_are_recorded(tmp_path: Path, kind: str) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    memory = MemoryCallback(tmp_path)
    common: dict[str, Any] = {
        "model": tiny.qwen2(),
        "processing_class": word_tokenizer(template=None, puts_bos=False),
        "callbacks": [memory],
    }
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    settings |= {"output_dir": str(tmp_path / "out"), "report_to": [], "save_strategy": "no"}
    if kind == "SFT":
        data = datasets.Dataset.from_list([{"text": "hi you hi"}] * 8)
        trainer = trl.SFTTrainer(args=trl.SFTConfig(**settings), train_dataset=data, **common)
    else:
        data = datasets.Dataset.from_list([{"prompt": "hi you"}] * 8)
        args = trl.GRPOConfig(num_generations=2, max_completion_length=3, **settings)
        reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
        trainer = trl.GRPOTrainer(args=args, train_dataset=data, reward_funcs=reward, **common)
    with memory.watch():
        trainer.train()
    found = [phase for _, phase in phases(tmp_path)]
    assert found.count("update/step") == 2
    assert found.count("rollout") == (2 if kind == "GRPO" else 0)
