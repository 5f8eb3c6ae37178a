"""From prompts to scored groups: what the engine is asked, what the scorer reads, what the trainer is given."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from plimsoll.plane.local import LocalPlane
from plimsoll.reward.fake import FakeScorer
from plimsoll.rollout.collector import Collected, Collector, CollectorSettings
from plimsoll.rollout.fake import FakeEngine, Script
from plimsoll.types import GroupId, Prompt, Request, SamplingParams, ScoreRequest
from plimsoll.update.worker import PolicyWorker
from tests import tiny
from tests.unit.update.support import make_batch, make_plan, make_recipe, save

STOP = 2
PIECES = {STOP: "<end>", 5: "a", 6: "b", 7: "ab"}


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES.get(i, f"[{i}]") for i in ids)


def draw(row: int, ids: Sequence[int] = (1, 9), *, epoch: int = 0, answer: str = "ab") -> tuple[GroupId, Prompt]:
    prompt = Prompt(row=row, token_ids=tuple(ids), text=f"prompt {row}", messages=(), answer=answer, plain=True)
    return GroupId(epoch=epoch, row=row), prompt


class Bench:
    """A collector over a fake engine and a fake scorer."""

    def __init__(
        self,
        script: Script,
        function: Callable[[ScoreRequest], float | None] = lambda request: 1.0,
        *,
        samples: int = 2,
        max_tokens: int = 4,
        overlong_filter: bool = False,
        length_penalty: Callable[[int], float] = lambda length: 0.0,
        num_slots: int = 3,
    ) -> None:
        self.engine = FakeEngine(script=script, num_slots=num_slots, logprob=-0.5)
        self.scorer = FakeScorer(function)
        self.plane = LocalPlane()
        self.collector = Collector(
            engine=self.engine,
            scorer=self.scorer,
            plane=self.plane,
            decode=decode,
            settings=CollectorSettings(
                samples_per_prompt=samples,
                params=SamplingParams(temperature=0.9, max_tokens=max_tokens, stop_token_ids=(STOP,)),
                seed=7,
                overlong_filter=overlong_filter,
                length_penalty=length_penalty,
            ),
        )

    def collect(self, *draws: tuple[GroupId, Prompt]) -> Collected:
        self.collector.start(draws)
        return self.collector.result()


def test_sampled_ids_stay_as_sampled_though_their_text_encodes_to_others() -> None:
    """The text of (5, 6) is that of the single token 7: encoding it again would train a token nobody sampled."""
    bench = Bench(lambda request, version: [5, 6, STOP])
    (group,) = bench.collect(draw(0, [1, 1, 9])).groups
    for sample in group.samples:
        assert sample.response_text == "ab"
        assert bench.plane.get(sample.ref, "token_ids").tolist() == [1, 1, 9, 5, 6, STOP]
        assert bench.plane.get(sample.ref, "sampled").tolist() == [False] * 3 + [True] * 3
        assert bench.plane.get(sample.ref, "rollout_logprobs").tolist() == [0.0] * 3 + [-0.5] * 3
        assert (sample.prompt_length, sample.response_length, sample.length) == (3, 3, 6)
    assert {request.token_ids for request in bench.engine.added} == {(1, 1, 9)}  # a doubled first token goes on too


def test_the_scorer_reads_the_text_without_the_stop_token_and_the_row() -> None:
    bench = Bench(lambda request, version: [5, STOP] if request.sample_id.index else [5, 7, 7, 7])
    bench.collect(draw(3, answer="an answer"))
    ((stopped, cut),) = [sorted(call, key=lambda request: request.response) for call in bench.scorer.calls]
    assert (stopped.response, cut.response) == ("a", "aababab")
    assert (stopped.prompt, stopped.answer, stopped.plain) == ("prompt 3", "an answer", True)


def test_groups_come_in_the_order_of_the_prompts_whatever_finishes_first() -> None:
    lengths = {(0, 0): 4, (0, 1): 1, (1, 0): 3, (1, 1): 2, (2, 0): 1, (2, 1): 4}

    def script(request: Request, version: int) -> list[int]:
        return [5] * (lengths[request.sample_id.group.row, request.sample_id.index] - 1) + [STOP, 0, 0, 0]

    def function(request: ScoreRequest) -> float:
        return request.sample_id.group.row + request.sample_id.index / 10

    for num_slots in (1, 3, 8):
        bench = Bench(script, function, num_slots=num_slots)
        collected = bench.collect(draw(2), draw(0), draw(1))
        assert [group.id.row for group in collected.groups] == [2, 0, 1]
        samples = [sample for group in collected.groups for sample in group.samples]
        assert [(s.id.group.row, s.id.index) for s in samples] == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
        assert [s.response_length for s in samples] == [1, 4, 4, 1, 3, 2]
        assert [s.reward for s in samples] == [2.0, 2.1, 0.0, 0.1, 1.0, 1.1]
        assert [request.sample_id for request in bench.scorer.calls[0]] == [s.id for s in samples]
        assert collected.num_tokens == 15
        assert {(r.seed, r.params.temperature) for r in bench.engine.added} == {(7, 0.9)}


def test_penalties_shape_scores_and_a_missing_score_stays_missing() -> None:
    def script(request: Request, version: int) -> list[int]:
        return [5, 5, 5, 5] if request.sample_id.index else [STOP]

    bench = Bench(script, lambda request: None if request.sample_id.group.row else 1.0, length_penalty=lambda n: -n / 8)
    scored, unscored = bench.collect(draw(0), draw(1)).groups
    assert [(s.score.value, s.reward) for s in scored.samples] == [(1.0, 0.875), (1.0, 0.5)]
    assert [(s.score.status, s.reward) for s in unscored.samples] == [("unscored", None)] * 2


@pytest.mark.parametrize("overlong_filter", [True, False])
def test_only_responses_that_were_cut_off_are_masked_and_only_when_asked(overlong_filter: bool) -> None:
    def script(request: Request, version: int) -> list[int]:
        return [5, 5, 5, STOP if request.sample_id.index else 5]  # both have the full length; one of them ended

    (group,) = Bench(script, overlong_filter=overlong_filter).collect(draw(0)).groups
    assert [sample.finish_reason for sample in group.samples] == ["length", "stop"]
    assert [sample.masked for sample in group.samples] == [overlong_filter, False]


def test_a_prompt_sampled_again_by_a_newer_policy_does_not_touch_the_older_sample() -> None:
    bench = Bench(lambda request, version: [5 + version, STOP])
    (older,) = bench.collect(draw(0)).groups
    bench.engine.set_version(1)
    (newer,) = bench.collect(draw(0)).groups
    assert [sample.version for group in (older, newer) for sample in group.samples] == [0, 0, 1, 1]
    ids = [bench.plane.get(group.samples[0].ref, "token_ids").tolist() for group in (older, newer)]
    assert ids == [[1, 9, 5, STOP], [1, 9, 6, STOP]]
    assert len(bench.plane) == 4


class Broken(Exception):
    pass


def broken(*_: object) -> float:
    raise Broken("on purpose")


def test_what_the_scorer_raises_is_raised_to_the_driver_and_the_next_round_works() -> None:
    answers: list[Callable[[ScoreRequest], float]] = [broken, lambda request: 1.0]
    bench = Bench(lambda request, version: [STOP], lambda request: answers[len(bench.scorer.calls) - 1](request))
    with pytest.raises(Broken, match="on purpose"):
        bench.collect(draw(0))
    assert bench.collect(draw(1)).groups[0].samples[0].reward == 1.0


def test_what_the_engine_raises_is_raised_to_the_driver() -> None:
    def script(request: Request, version: int) -> list[int]:
        raise Broken("in the engine")

    with pytest.raises(Broken, match="in the engine"):
        Bench(script).collect(draw(0))


def test_the_driver_is_free_while_a_round_runs() -> None:
    go_on = threading.Event()

    def script(request: Request, version: int) -> list[int]:
        assert go_on.wait(timeout=10)
        return [STOP]

    bench = Bench(script)
    bench.collector.start([draw(0)])
    go_on.set()  # reached only because `start` does not wait for the round
    assert len(bench.collector.result().groups) == 1


def test_close_ends_a_round_that_would_run_for_ever() -> None:
    started = threading.Event()

    def script(request: Request, version: int) -> Sequence[int]:
        started.set()
        return range(5, 10**9)

    bench = Bench(script, max_tokens=10**9)
    bench.collector.start([draw(0), draw(1)])
    assert started.wait(timeout=10)
    bench.collector.close()
    assert bench.engine.idle
    assert bench.scorer.calls == []
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]
    bench.collector.close()  # again: nothing to end


def test_the_tokens_of_a_sample_without_a_score_change_nothing(tmp_path: Path) -> None:
    """Two runs that differ only in what the unscored sample of each group says end in the same weights."""
    folder = save(tiny.qwen2(), tmp_path)

    def weights_after(unscored: list[int]) -> dict[str, torch.Tensor]:
        def script(request: Request, version: int) -> list[int]:
            index, row = request.sample_id.index, request.sample_id.group.row
            return [*unscored, STOP] if index == 1 else [10 + index, 20 + row, 30, STOP]

        def function(request: ScoreRequest) -> float | None:
            return None if request.sample_id.index == 1 else float(request.sample_id.index)

        bench = Bench(script, function, samples=3, max_tokens=9)
        groups = list(bench.collect(draw(0, [3, 4]), draw(1, [5])).groups)
        worker = PolicyWorker(make_recipe(folder), make_plan(), bench.plane)
        batch = make_batch(groups)
        assert worker.advantages(batch).values["advantage/unscored_samples"] == 2
        assert worker.update(batch).values["train/tokens"] == 2 * (2 + 4) + 2 * (1 + 4)
        return {name: tensor.clone() for name, tensor in worker.model_state().items()}

    first, second = weights_after([40]), weights_after([50, 51, 52, 53, 54, 55])
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    untouched = tiny.qwen2().double().state_dict()
    assert not torch.equal(first["model.norm.weight"], untouched["model.norm.weight"])
