"""What a micro-batch and a device show takes the place of the plan's formulas, and is remembered."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from plimsoll import calibrate
from plimsoll.calibrate import GRADIENTS, LOGPROB, fixed_parts, key_of, measure, remember, remembered
from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.loss import chunked
from plimsoll.memory import names
from plimsoll.memory.device import DeviceReader, DeviceReading, EngineMemory, FakeDevice
from plimsoll.memory.plan.choose import plan_without_advice
from plimsoll.memory.plan.job import GIB, MIB, Job
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.resident import Place, Resident, Survival
from plimsoll.model.build import read_config
from plimsoll.model.measure import sizes_of
from plimsoll.parallel.tensors import local
from plimsoll.plane.local import LocalPlane
from plimsoll.sizing import model_sizes, replan
from plimsoll.update.worker import PolicyWorker
from tests.tiny import qwen2
from tests.unit.memory.plan.support import cpu, make_job
from tests.unit.update.support import make_plan, make_recipe, save

LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(qwen2(dtype=torch.float64), tmp_path_factory.mktemp("qwen2"))


def recipe_of(folder: Path, *, prompts: int = 32, **sections: Any) -> Recipe:
    recipe = make_recipe(folder, **sections)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"prompts_per_step": prompts})})


def job_of(recipe: Recipe, folder: Path, **changes: Any) -> Job:
    return make_job(recipe, model_sizes(read_config(folder)), **({"longest_sequence": LONGEST} | changes))


def planned(job: Job, **changes: Any) -> RunPlan:
    return make_plan(memory=plan_without_advice(job, cpu(4)), **changes)


# ── the key ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _job(change: Callable[[Job], Job]) -> Callable[[Job, RunPlan], tuple[Job, RunPlan]]:
    return lambda job, plan: (change(job), plan)


def _section(name: str, **values: Any) -> Callable[[Job, RunPlan], tuple[Job, RunPlan]]:
    def change(job: Job) -> Job:
        section = vars(job.recipe)[name].model_copy(update=values)
        return replace(job, recipe=job.recipe.model_copy(update={name: section}))

    return _job(change)


def _plan(**values: Any) -> Callable[[Job, RunPlan], tuple[Job, RunPlan]]:
    return lambda job, plan: (job, plan.model_copy(update=values))


def _budget(job: Job, plan: RunPlan) -> tuple[Job, RunPlan]:
    assert plan.memory is not None
    choices = plan.memory.choices.model_copy(update={"token_budget": 24})
    return job, plan.model_copy(update={"memory": plan.memory.model_copy(update={"choices": choices})})


FACTS: dict[str, Callable[[Job, RunPlan], tuple[Job, RunPlan]]] = {
    "shapes": _job(lambda job: replace(job, sizes=sizes_of(qwen2(vocab=65)))),
    "family": _job(lambda job: replace(job, sizes=replace(job.sizes, family="other"))),
    "dtype": _section("model", dtype="float32"),
    "compute dtype": _plan(compute_dtype="bfloat16"),
    "packing": _plan(packing="single"),
    "checkpointing": _plan(activation_checkpointing="full"),
    "budget": _budget,
    "longest": _job(lambda job: replace(job, longest_sequence=LONGEST + 1)),
    "chunk": _plan(logprob_chunk=6),
    "entropy": _section("algorithm", entropy_coefficient=0.1),
    "compile": _section("train", compile=True),
    "shard": _section("parallel", shard=2),
    "gather": _section("memory", default_stream_gather=True),
    "threads": _plan(threads=3),
}


@pytest.mark.parametrize("fact", FACTS)
def test_the_key_changes_with_each_fact(folder: Path, fact: str) -> None:
    job = job_of(recipe_of(folder), folder)
    plan = planned(job)
    assert key_of(*FACTS[fact](job, plan)) != key_of(job, plan)


def test_the_key_changes_with_the_libraries_and_with_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(recipe_of(folder), folder)
    plan = planned(job)
    key = key_of(job, plan)
    assert key_of(*_section("train", learning_rate=1.0)(job, plan)) == key
    assert key_of(job, plan.model_copy(update={"steps": 99})) == key
    for library in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(vars(calibrate)[library], "__version__", "0.0")
            assert key_of(job, plan) != key


def test_one_micro_batch_and_several_of_the_same_size_have_different_keys(folder: Path) -> None:
    few, many = (job_of(recipe_of(folder, prompts=prompts), folder) for prompts in (1, 2))
    budget = few.recipe.rollout.samples_per_prompt * LONGEST

    def key(job: Job) -> str:
        recipe = job.recipe.model_copy(update={"train": job.recipe.train.model_copy(update={"token_budget": budget})})
        job = replace(job, recipe=recipe)
        return key_of(job, planned(job))

    assert key(few) == key(many).replace("several", "one") != key(many)


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_remembered_comes_back_beside_what_others_have_measured(tmp_path: Path) -> None:
    store = tmp_path / "new" / "calibration.json"
    assert remembered("first", store) == {}
    remember("first", {LOGPROB: 1, GRADIENTS: 2}, store)
    remember("second", {LOGPROB: 3, GRADIENTS: 4}, store)
    remember("first", {LOGPROB: 5, GRADIENTS: 6}, store)
    assert remembered("first", store) == {LOGPROB: 5, GRADIENTS: 6}
    assert remembered("second", store) == {LOGPROB: 3, GRADIENTS: 4}
    assert remembered("third", store) == {}


def test_the_store_is_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    remember("key", {LOGPROB: 1, GRADIENTS: 2})
    assert remembered("key") == {LOGPROB: 1, GRADIENTS: 2}
    assert (tmp_path / ".cache" / "plimsoll" / "calibration.json").is_file()


@pytest.mark.parametrize(
    "text", ["", "no json", "[1, 2]", '{"key": 7}', '{"key": {"logprob": "x", "update/gradients": 1}}', '{"key": {}}']
)
def test_a_broken_store_is_nothing_remembered_and_is_written_anew(tmp_path: Path, text: str) -> None:
    store = tmp_path / "calibration.json"
    store.write_text(text, encoding="utf-8")
    assert remembered("key", store) == {}
    remember("key", {LOGPROB: 1, GRADIENTS: 2}, store)
    assert remembered("key", store) == {LOGPROB: 1, GRADIENTS: 2}
    json.loads(store.read_text(encoding="utf-8"))


def test_a_home_that_cannot_be_written_to_costs_only_that(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    store = tmp_path / "file" / "calibration.json"
    remember("key", {LOGPROB: 1, GRADIENTS: 2}, store)
    assert remembered("key", store) == {}


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_measured_figures_replace_the_formulas_and_what_no_longer_fits_is_refused(folder: Path) -> None:
    job = job_of(recipe_of(folder, model={"dtype": "float32"}), folder)
    plan = planned(job, compute_dtype="float32", kv_bytes=0)
    measured = replace(job, measured={LOGPROB: 111, GRADIENTS: 222 * MIB}, calibrates=False)
    again = replan(plan, measured, built=True).memory
    assert again is not None
    assert again.calibrated
    rows = {row.phase: row for row in again.phases}
    assert rows[GRADIENTS].workspace == {"measured": 222 * MIB}
    assert "calibration" not in rows["load"].workspace
    with pytest.raises(RefusedError, match="update/gradients"):
        replan(plan, replace(measured, measured={GRADIENTS: 10**15}), built=True)


def test_a_calibration_is_part_of_the_load(folder: Path) -> None:
    """All that an update's gradients take; our engine's cache comes later, into the same memory."""
    job = job_of(recipe_of(folder, prompts=1), folder)
    on = job.recipe.model_copy(update={"memory": job.recipe.memory.model_copy(update={"calibration": "on"})})
    for measured in (dict[str, int](), {GRADIENTS: 5 * MIB}):
        found = plan_without_advice(replace(job, recipe=on, measured=measured), cpu(4))
        rows = {row.phase: row.device_bytes for row in found.phases}
        assert rows["load"] == max(rows["update/gradients"] - found.choices.kv_bytes, rows["save"])
    assert not job.calibration_wanted("cpu")  # `auto`: a small model on a CPU
    assert job.calibration_wanted("cuda")


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Peaks:
    """A device whose peaks are given."""

    name = "fake:0"

    def __init__(self, peaks: Iterator[int]) -> None:
        self._peaks = peaks

    def reset_peaks(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def read(self) -> DeviceReading:
        return DeviceReading(
            allocated=0, reserved=0, allocated_peak=next(self._peaks), reserved_peak=0, used=0, total=0, pinned=None
        )


def measured_with(worker: PolicyWorker, job: Job, peaks: list[int]) -> dict[str, int]:
    # Each measurement reads once before and once after.
    found = iter([value for peak in peaks for value in (0, peak)])
    measured = measure(worker, job, planned(job), cast("DeviceReader", Peaks(found)))
    assert list(found) == []
    return measured


def test_gradients_are_gone_afterwards_and_the_weights_as_before(folder: Path) -> None:
    recipe = recipe_of(folder)
    worker = PolicyWorker(recipe, make_plan(), LocalPlane())
    job = job_of(recipe, folder)
    before = {name: tensor.clone() for name, tensor in worker.model_state().items()}
    found = measure(worker, job, planned(job), None)
    assert set(found) == {LOGPROB, GRADIENTS}
    assert all(value >= 0 for value in found.values())
    assert worker.optimizer.gradients() == []
    assert worker.optimizer.moments() == {}
    assert worker.version == worker.optimizer.steps == 0
    after = worker.model_state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(not local(moment).any() for moment in worker.optimizer.tensors())
    worker.close()


def test_the_first_micro_batch_makes_the_gradients_and_the_next_ones_find_them(folder: Path) -> None:
    worker = PolicyWorker(recipe_of(folder), make_plan(), LocalPlane())
    gradients = sum(tensor.nbytes for tensor in worker.model_state().values())
    one = job_of(recipe_of(folder, prompts=1), folder)
    assert measured_with(worker, one, [7, gradients + 50]) == {LOGPROB: 7, GRADIENTS: 50}
    small = recipe_of(folder, train={"token_budget": 2 * LONGEST})
    several = job_of(small, folder)
    assert measured_with(worker, several, [7, gradients + 50, 60]) == {LOGPROB: 7, GRADIENTS: 60}
    assert measured_with(worker, several, [7, gradients - 50, 10]) == {LOGPROB: 7, GRADIENTS: 10}
    assert measured_with(worker, several, [7, gradients + 50, 10]) == {LOGPROB: 7, GRADIENTS: 50}
    worker.close()


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_entropy_has_a_gradient_where_the_loss_has_it(
    folder: Path, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(folder, algorithm={"entropy_coefficient": coefficient}, prompts=1)
    worker = PolicyWorker(recipe, make_plan(), LocalPlane())
    job = job_of(recipe, folder)
    original = vars(chunked)["_grad_raw_logits"]
    seen: set[bool] = set()

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.add(args[5] is not None)
        return cast("Tensor", original(*args, **kwargs))

    monkeypatch.setattr(chunked, "_grad_raw_logits", spy)
    measure(worker, job, planned(job), None)
    assert seen == {coefficient > 0}
    seen.clear()
    measure(worker, replace(job, objective="supervised"), planned(job), None)
    assert seen == {False}
    worker.close()


def test_on_a_cpu_the_process_itself_is_measured() -> None:
    meter = calibrate._Meter(None)  # pyright: ignore[reportPrivateUsage]
    held: list[Tensor] = []

    def work() -> None:
        tensors = [torch.full((64 * MIB // 4,), 1.0), torch.full((32 * MIB // 4,), 1.0)]
        held.append(tensors[1])

    assert meter.highest(work) == pytest.approx(96 * MIB, abs=4 * MIB)
    assert meter.highest(lambda: None) < 4 * MIB
    meter.close()


# ── fixed parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fixed_parts_are_what_the_device_shows(tmp_path: Path) -> None:
    """On the device: a context and a communicator, tensors of the trainer, what nobody owns, a pool that sleeps."""
    device = FakeDevice(total=80 * GIB, outside=3 * GIB)
    device.add_pool(10 * GIB)
    device.sleep()
    device.allocate(5 * GIB)
    owned = Resident(name=names.ACTOR_PARAMETERS, survival=Survival.KEEP, measured=lambda: 4 * GIB)
    buffers = Resident(name="arena", survival=Survival.KEEP, measured=lambda: 9 * GIB, place=Place.HOST)
    recorder = Recorder(
        tmp_path / "memory.jsonl",
        rank=0,
        device=device,
        residents=list,  # asked in the load, where nobody is known yet
        interval=1.0,
        engine=device.engine,
    )
    planned = {f"{names.COMMUNICATOR}/shard": GIB, names.KERNEL_BUFFERS: 96 * MIB}
    takes = {names.KV_CACHE: 7 * GIB, names.ROLLOUT_PARAMETERS: 3 * GIB}
    residents = [owned, buffers]
    assert fixed_parts(recorder.holdings(), residents, takes, planned) == {
        **takes,
        names.CUDA_CONTEXT: 2 * GIB,
        names.KERNEL_BUFFERS: GIB,
    }
    device.free(GIB)  # nobody has multiplied yet
    found = fixed_parts(recorder.holdings(), residents, takes, planned)
    assert found[names.KERNEL_BUFFERS] == 96 * MIB
    recorder.close()


def test_a_cpu_has_no_fixed_parts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "memory.jsonl", rank=0, device=None, residents=list, interval=1.0)
    assert recorder.holdings().engine == EngineMemory(counted=0, mapped=0)
    assert fixed_parts(recorder.holdings(), [], {}, {}) == {}
    recorder.close()
