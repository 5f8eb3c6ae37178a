import pytest

from plimsoll.rollout.fake import FakeEngine
from plimsoll.types import ColocatedEngine, Engine, FinishReason, Request
from tests.unit.rollout.requests import drain, request, sample_id


def _script(asked: Request, version: int) -> list[int]:
    return [10 * version + 20 + asked.sample_id.index, 5, 6, 7, 2, 9]


def test_scripted_completions_end_at_stop_tokens_and_lengths():
    engine = FakeEngine(script=_script, num_slots=2, logprob=-0.5)
    protocol: Engine = engine
    asked = [
        request(0, [1], index=0, stop=(2,)),
        request(0, [1], index=1, max_tokens=2),
        request(0, [1], index=2, stop=(6, 2)),
    ]
    finished = drain(protocol, asked)
    assert [finished[sample_id(0, i)].token_ids for i in range(3)] == [(20, 5, 6, 7, 2), (21, 5), (22, 5, 6)]
    assert [finished[sample_id(0, i)].finish_reason for i in range(3)] == ["stop", "length", "stop"]
    assert finished[sample_id(0, 1)].logprobs == (-0.5, -0.5)
    assert engine.added == asked


def test_slots_bound_what_runs_at_once():
    engine = FakeEngine(script=_script, num_slots=1)
    engine.add([request(i, [1], max_tokens=2) for i in range(3)])
    assert [len(engine.step()) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    assert engine.idle


def test_abort_and_new_versions_behave_as_in_the_native_engine():
    engine = FakeEngine(script=_script, num_slots=1)
    engine.add([request(i, [1], max_tokens=3) for i in range(3)])
    engine.step()
    (queued,) = engine.abort([sample_id(2), sample_id(77)])
    assert (queued.token_ids, queued.finish_reason) == ((), FinishReason.ABORT)
    engine.set_version(4)
    finished = drain(engine)
    assert finished[sample_id(0)].token_ids == (60, 5, 6)
    assert finished[sample_id(0)].version == 4
    assert engine.versions == [4]
    engine.add([request(8, [1])])
    engine.step()
    assert [done.token_ids for done in engine.abort()] == [(60,)]
    assert engine.idle


def test_a_script_that_ends_too_early_is_a_mistake():
    engine = FakeEngine(script=lambda asked, version: [5])
    engine.add([request(0, [1])])
    engine.step()
    with pytest.raises(AssertionError, match="0:0:0 ran out of tokens"):
        engine.step()


def test_a_prompt_that_was_cached_before_a_sync_is_a_miss_after_it():
    engine = FakeEngine(script=_script)
    protocol: ColocatedEngine = engine
    assert protocol.awake("weights")
    drain(engine, [request(0, [1, 2], stop=(5,)), request(0, [1, 2], index=1, stop=(5,))])
    assert (engine.prefix_misses, engine.prefix_hits) == (1, 1)
    drain(engine, [request(1, [1, 2], stop=(5,))])
    assert (engine.prefix_misses, engine.prefix_hits) == (1, 2)
    engine.begin(1)
    engine.commit(1)
    drain(engine, [request(2, [1, 2], stop=(5,))])
    assert (engine.prefix_misses, engine.prefix_hits) == (2, 2)


def test_the_ledger_follows_sleep_and_wake_and_a_sleep_without_weights_has_no_version():
    ledger: list[tuple[str, int, int]] = []
    engine = FakeEngine(script=_script, weights_size=10, kv_size=100)
    engine.watch = lambda: ledger.append((engine.events[-1], engine.weights_bytes, engine.kv_bytes))
    for version in (1, 2):
        engine.sleep(("kv_cache", "weights"))
        assert engine.version == -1
        engine.wake(("weights",))
        engine.begin(version)
        engine.bucket([])
        engine.commit(version)
        engine.wake(("kv_cache",))
        assert engine.version == version
    cycle = [
        ("engine.sleep(kv_cache)", 10, 0),
        ("engine.sleep(weights)", 0, 0),
        ("engine.wake(weights)", 10, 0),
        ("engine.begin", 10, 0),
        ("engine.bucket", 10, 0),
        ("engine.commit", 10, 0),
        ("engine.wake(kv_cache)", 10, 100),
    ]
    assert ledger == cycle * 2


def test_what_a_real_engine_would_not_survive_is_a_mistake():
    engine = FakeEngine(script=_script)
    engine.add([request(0, [1])])
    with pytest.raises(AssertionError, match="unfinished requests"):
        engine.sleep(("kv_cache",))
    engine.abort()
    engine.sleep(("weights",))
    with pytest.raises(AssertionError, match="weights are asleep"):
        engine.begin(1)
    engine.add([request(0, [1])])
    with pytest.raises(AssertionError, match="a step while"):
        engine.step()
