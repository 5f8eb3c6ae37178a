"""What the machine has and what a recipe alone says about the work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory.host import HostReader
from plimsoll.memory.plan import capacity
from plimsoll.memory.plan.capacity import Gpus, assumptions, job_of, machine
from plimsoll.memory.plan.job import GIB
from tests.unit.memory.plan.support import REPORT_B, TINY, make_recipe


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that has one."""
    monkeypatch.setattr(capacity, "find_gpus", lambda: None)


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int, gib: int) -> None:
    """So many GPUs of that size."""
    monkeypatch.setattr(capacity, "find_gpus", lambda: Gpus(count=count, total_bytes=gib * GIB))


def available() -> int:
    reader = HostReader()
    found = reader.read().available
    reader.close()
    assert found is not None
    return found


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_rank_has_its_share_of_the_free_host_memory() -> None:
    found = machine(make_recipe(cluster={"ranks": 6, "ranks_per_node": 4}))
    assert (found.device, found.ranks, found.ranks_per_node, found.nodes) == ("cpu", 6, 4, 2)
    assert found.host_bytes == pytest.approx(available(), rel=0.1)
    assert found.device_bytes == found.host_bytes // 4
    assert machine(make_recipe(memory={"host_memory": "1GiB"})).device_bytes == GIB


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_for_another_machine_takes_what_the_recipe_says() -> None:
    stated = {"device_memory": "79GiB", "host_memory": "100000GiB"}
    found = machine(make_recipe(memory=stated, cluster={"ranks": 32, "ranks_per_node": 8}))
    assert (found.device, found.device_bytes, found.host_bytes) == ("cuda", 79 * GIB, 100000 * GIB)
    # A run here has no more than there is, whatever the recipe says.
    assert machine(make_recipe(memory=stated), device="cpu").host_bytes <= available() * 1.1
    with pytest.raises(RefusedError, match=r"memory\.device_memory"):
        machine(make_recipe(), device="cuda")


def test_a_gpu_that_is_here_bounds_what_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2, 24)
    assert machine(make_recipe()).device_bytes == 24 * GIB
    assert machine(make_recipe(memory={"device_memory": "80GiB"})).device_bytes == 24 * GIB
    assert machine(make_recipe(memory={"device_memory": "16GiB"})).device_bytes == 16 * GIB
    assert machine(make_recipe(), device="cpu").device == "cpu"
    far = machine(make_recipe(memory={"host_memory": "100000GiB"}, cluster={"ranks": 8}))
    assert far.host_bytes == 100000 * GIB  # more ranks than there are GPUs: not this machine


def test_the_driver_is_asked_and_a_missing_one_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Driver:
        """Two devices, of 80 and of 40 GiB."""

        def cuInit(self, flags: int) -> int:
            asked.append("init")
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def cuDeviceGet(self, handle: Any, number: int) -> int:
            handle._obj.value = 7 + number
            return 0

        def cuDeviceTotalMem_v2(self, total: Any, handle: Any) -> int:
            total._obj.value = {7: 80, 8: 40}[handle.value] * GIB
            return 0

    monkeypatch.setattr(capacity.ctypes, "CDLL", lambda name: Driver())
    assert capacity.find_gpus() == Gpus(count=2, total_bytes=40 * GIB)
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    assert capacity.find_gpus() is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(capacity.ctypes, "CDLL", missing)
    assert capacity.find_gpus() is None


def write(folder: Path, config: Any) -> Path:
    """A folder with a config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder


def policy(recipe: Recipe) -> int:
    return job_of(recipe, "policy").sizes.num_parameters


def test_the_model_is_that_of_the_weights_where_they_are_here_else_that_of_the_config(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", TINY), write(tmp_path / "large", REPORT_B)
    of_small, of_large = (policy(make_recipe(model={"path": None, "config": str(f)})) for f in (small, large))
    assert of_small != of_large
    both = {"path": str(large), "config": str(small)}
    assert policy(make_recipe(model=both)) == of_large
    assert policy(make_recipe(model={"path": str(large / "config.json"), "config": str(small)})) == of_large
    run = tmp_path / "run"
    write(run / "checkpoints" / "step_9" / "model", TINY)
    write(run / "checkpoints" / "step_10" / "model", REPORT_B)
    (run / "checkpoints" / "step_11").mkdir()  # not written yet
    assert policy(make_recipe(model={"path": str(run), "config": str(small)})) == of_large
    assert policy(make_recipe(model={"path": str(run / "checkpoints" / "step_9")})) == of_small
    shutil.rmtree(large)
    assert policy(make_recipe(model=both)) == of_small
    with pytest.raises(RefusedError, match=r"model\.config"):
        job_of(make_recipe(model={"path": str(large)}), "policy")
    with pytest.raises(RefusedError, match=r"model\.config="):
        job_of(make_recipe(model={"path": None, "config": str(large)}), "policy")


def test_the_work_is_what_the_recipe_bounds(tmp_path: Path) -> None:
    config = str(write(tmp_path / "model", {**TINY, "max_position_embeddings": 600}))
    recipe = make_recipe(
        model={"path": None, "config": config},
        data={"train": "x", "eval": "y", "max_eval_rows": 7, "prompts_per_step": 12, "max_prompt_tokens": 500},
        rollout={"samples_per_prompt": 4, "max_response_tokens": 200, "tensor_parallel": 2, "engine": "vllm"},
        cluster={"ranks": 8},
        algorithm={"kl_coefficient": 0.1},
    )
    job = job_of(recipe, "policy")
    assert (job.longest_prompt, job.longest_sequence, job.num_sequences) == (500, 700, 12)  # 48 samples, 4 engines
    assert job.reference == job.sizes
    assert job.generates
    supervised = job_of(recipe, "supervised")
    assert (supervised.longest_sequence, supervised.num_sequences, supervised.reference) == (600, 2, None)
    assert not job_of(make_recipe(model={"path": None, "config": config}), "supervised").generates
    found = machine(make_recipe(memory={"device_memory": "1GiB"}), device="cuda")
    assert any("targets" in note for note in assumptions(supervised, found))
    assert not any("targets" in note for note in assumptions(job, found))
