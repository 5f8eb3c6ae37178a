"""The plan as text: every number once, aligned, within the width of a terminal."""

import pytest

from plimsoll.config.planned import Advice, MemoryPlan, PlannedHost, PlannedPhase, Refusal
from plimsoll.memory.plan.curve import CurvePoint, kv_curve
from plimsoll.memory.plan.job import GIB, MIB, Job
from plimsoll.memory.plan.show import show
from tests.unit.memory.plan.support import TINY, gpu, make_choices, make_job, make_recipe


def row(phase: str, residents: dict[str, int], work: dict[str, int], evicted: tuple[str, ...] = ()) -> PlannedPhase:
    """Of a device with 80 GiB."""
    used = sum(residents.values()) + sum(work.values())
    return PlannedPhase(
        slot="all",
        phase=phase,
        device_bytes=used,
        capacity_bytes=80 * GIB,
        headroom_bytes=80 * GIB - used,
        residents=residents,
        workspace_bytes=sum(work.values()),
        workspace=work,
        evicted=evicted,
    )


CONTEXT = {"cuda_context": GIB // 2, "communicator/shard": GIB // 2, "communicator/replicate": GIB}


def plan_of(*, fits: bool = True) -> MemoryPlan:
    """Two phases, or three of which one does not fit."""
    phases = [
        row("rollout", {"kv_cache": 30 * GIB, **CONTEXT}, {"decode": 100 * MIB}, ("actor_parameters",)),
        row("update/step", {"actor_parameters": 20 * GIB, **CONTEXT}, {"activations": 12 * GIB, "logits": 2 * GIB}),
    ]
    refusals: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    if not fits:
        phases.append(row("save", {"actor_parameters": 90 * GIB, **CONTEXT}, {}))
        refusals = (
            Refusal(slot="all", phase="save", rank=0, need_bytes=92 * GIB, have_bytes=80 * GIB, largest="moments"),
            Refusal(slot="all", phase="host", rank=8, need_bytes=9 * GIB, have_bytes=8 * GIB),
        )
        advice = (Advice(set=("a.b=1", "c.d=2"), frees_bytes=20 * GIB), Advice(set=("e.f=3",), frees_bytes=13 * GIB))
    return MemoryPlan(
        fits=fits,
        phases=tuple(phases),
        host=PlannedHost(
            node_peak_bytes=(8 * GIB, 8 * GIB, 4 * GIB),
            rank_peak_bytes=(GIB,) * 20,
            file_cache_bytes=(16 * GIB, 16 * GIB, 8 * GIB),
            consumers={"host_arena": 900 * MIB, "process": 124 * MIB},
            capacity_bytes=8 * GIB,
        ),
        moved_bytes_per_step=40 * GIB,
        wire_bytes_per_step=300 * GIB,
        seconds_per_step={"moved": 0.8, "wire": 12.25, "compute": 100.0},
        refusals=refusals,
        advice=advice,
        choices=make_choices(kv_bytes=30 * GIB),
        notes=("Something is assumed",),
    )


def job_of() -> Job:
    return make_job(make_recipe(cluster={"ranks": 20}), TINY)


def text_of(plan: MemoryPlan) -> list[str]:
    return show(plan, job_of(), gpu(80, ranks=20, ranks_per_node=8)).splitlines()


def test_a_row_for_each_phase_with_its_sum_and_what_is_free() -> None:
    lines = text_of(plan_of())
    head = next(line for line in lines if line.lstrip().startswith("phase"))
    assert head.split() == ["phase", "actor", "KV", "cache", "context", "work", "sum", "free"]
    assert next(line for line in lines if line.lstrip().startswith("rollout")).split() == [
        *("rollout", "away", "30.0", "2.0", "0.1", "32.1", "47.9")
    ]
    step = next(line for line in lines if line.lstrip().startswith("update/step"))
    assert step.split() == ["update/step", "20.0", "2.0", "14.0", "36.0", "44.0"]
    assert len(step) == len(head)  # to the right
    assert any("update/step: activations 12.0 GiB, logits 2.00 GiB" in line for line in lines)


def test_nodes_ranks_consumers_and_cache_of_the_host() -> None:
    text = "\n".join(text_of(plan_of()))
    assert "2 x 8.00 GiB, 4.00 GiB" in text
    assert "20 x 1.00 GiB" in text
    assert "host_arena 900 MiB, process 124 MiB" in text
    assert "2 x 16.0 GiB, 8.00 GiB of the reference's files" in text


def test_what_is_moved_and_how_long_it_takes() -> None:
    lines = [line.split() for line in text_of(plan_of())]
    assert ["over", "PCIe,", "a", "rank", "40.0", "GiB", "0.8", "s"] in lines
    assert ["over", "the", "wire,", "a", "rank", "300", "GiB", "12.2", "s"] in lines
    assert ["trainer's", "arithmetic", "100", "s"] in lines


def test_a_plan_that_fits_says_how_much_is_left_and_one_that_does_not_why() -> None:
    fits = "\n".join(text_of(plan_of()))
    assert "It fits: the fullest phase, update/step, leaves 44.0 GiB free." in fits
    assert "Something is assumed" in fits
    refused = "\n".join(text_of(plan_of(fits=False)))
    assert "It does not fit." in refused
    assert "save on rank 0 needs 92.0 GiB and has 80.0 GiB, 12.0 GiB short; the largest part is moments" in refused
    assert "the node of rank 8 needs 9.00 GiB" in refused
    assert "a.b=1 c.d=2 together make it fit: 20.0 GiB less in save" in refused
    assert "e.f=3 alone makes it fit" in refused
    assert next(line for line in refused.splitlines() if line.lstrip().startswith("save")).endswith("-12.0 <")


def test_lines_fit_a_terminal() -> None:
    trained = ("actor_parameters", "actor_gradients", "optimizer_state", "reference_parameters", "rollout_parameters")
    every = dict.fromkeys((*trained, "kv_cache", "engine_buffers", "cuda_context"), 1000 * GIB)
    parts = {f"part_{number}": GIB for number in range(20)}
    wide = plan_of().model_copy(update={"phases": (row("update/gradients", every, parts),), "notes": ("word " * 90,)})
    assert max(len(line) for line in text_of(wide)) <= 120
    assert not any(line != line.rstrip() for line in text_of(wide))


def test_small_models_are_shown_in_mebibytes() -> None:
    small = plan_of().model_copy(update={"phases": (row("rollout", {"kv_cache": 20 * MIB}, {}),)})
    lines = text_of(small)
    assert any(line.startswith("Device, MiB") for line in lines)
    assert next(line for line in lines if line.lstrip().startswith("rollout")).split()[1] == "20.0"


def test_the_curve_goes_from_one_sequence_to_all_of_them() -> None:
    job = make_job(make_recipe(rollout={"samples_per_prompt": 4}), TINY)
    one = job.sizes.kv_bytes_per_token(4) * (512 + 256)

    def replan(changed: Job) -> MemoryPlan:
        kv = int(changed.recipe.rollout.kv_memory or 0)
        return plan_of().model_copy(update={"moved_bytes_per_step": 2 * kv, "fits": kv <= 20 * one})

    points = kv_curve(job, replan)
    assert [points[0].kv_bytes, points[-1].kv_bytes] == [one, one * job.num_sequences]
    assert len(points) == 8
    assert all(point.moved_bytes_per_step == 2 * point.kv_bytes for point in points)
    assert [point.fits for point in points] == [point.kv_bytes <= 20 * one for point in points]
    shown = show(plan_of(), job, gpu(80), points)
    assert shown.count("does not fit") == sum(not point.fits for point in points)
    assert kv_curve(make_job(job.recipe, TINY, generates=False), replan) == ()
    assert CurvePoint(kv_bytes=1, moved_bytes_per_step=2, fits=True) not in points


def test_the_curve_ends_at_the_device_where_the_work_could_use_more() -> None:
    job = make_job(make_recipe(rollout={"samples_per_prompt": 4}), TINY)
    one = job.sizes.kv_bytes_per_token(4) * (512 + 256)
    small = row("rollout", {}, {}).model_copy(update={"capacity_bytes": 9 * one})
    points = kv_curve(job, lambda changed: plan_of().model_copy(update={"phases": (small,)}))
    assert [points[0].kv_bytes, points[-1].kv_bytes] == [one, 9 * one]


@pytest.mark.parametrize("words", range(14, 24))
def test_a_figure_and_its_unit_stand_on_one_line(words: int) -> None:
    text = "word " * words + "26.2 GiB of 40 % of 989 TFLOP/s"
    lines = text_of(plan_of().model_copy(update={"notes": (text,)}))
    assert any("26.2 GiB" in line for line in lines)
    assert any("40 % of" in line for line in lines)
    assert any("989 TFLOP/s" in line for line in lines)


def test_libraries_are_part_of_the_contexts_column() -> None:
    lines = text_of(plan_of().model_copy(update={"phases": (row("save", {**CONTEXT, "kernel_buffers": GIB}, {}),)}))
    assert lines[lines.index(next(line for line in lines if line.startswith("Device"))) + 2].split()[1] == "3.0"
