"""Short ways to write requests and to run an engine until it is empty."""

from collections.abc import Iterable, Sequence

from plimsoll.types import Completion, Engine, GroupId, Request, SampleId, SamplingParams


def sample_id(row: int, index: int = 0, epoch: int = 0) -> SampleId:
    return SampleId(group=GroupId(epoch=epoch, row=row), index=index)


def request(
    row: int,
    token_ids: Sequence[int],
    *,
    index: int = 0,
    max_tokens: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
) -> Request:
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, stop_token_ids=stop
    )
    return Request(sample_id=sample_id(row, index), token_ids=tuple(token_ids), params=params, seed=seed)


def drain(engine: Engine, requests: Iterable[Request] = ()) -> dict[SampleId, Completion]:
    engine.add(list(requests))
    finished: dict[SampleId, Completion] = {}
    while not engine.idle:
        for completion in engine.step():
            assert completion.sample_id not in finished
            finished[completion.sample_id] = completion
    return finished
