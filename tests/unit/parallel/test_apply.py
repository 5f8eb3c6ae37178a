"""What the order of techniques needs of torch."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from plimsoll.errors import RefusedError
from plimsoll.model.policy import PackedPolicy
from plimsoll.model.spec import model_spec
from plimsoll.parallel.apply import gather_in_default_stream
from tests import tiny


def test_a_torch_that_cannot_gather_in_the_default_stream_is_refused_with_setting_and_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FSDPModule, "_set_unshard_async_op")
    lm = tiny.qwen2()
    policy = PackedPolicy(lm, model_spec(lm), packing="padded", chunk=8)
    with pytest.raises(RefusedError) as error:
        gather_in_default_stream(policy)
    assert error.value.exit_code == 2
    assert "memory.default_stream_gather=false" in str(error.value)
    assert f"torch {torch.__version__}" in str(error.value)
