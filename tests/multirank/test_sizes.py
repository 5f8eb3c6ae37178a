"""Bytes of a rank's shard, from config.json alone, against those that FSDP2 gives it."""

import json
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from plimsoll.model.sizes import read_sizes
from plimsoll.model.spec import decoder_layers
from tests.ranks import run_ranks
from tests.tiny import CHECKPOINT_FAMILIES

pytestmark = pytest.mark.timeout(300)

SHARDED = ("qwen3", "qwen2", "qwen3_next")
"""No dim a multiple of 4; tied; experts, and a matrix with a single row."""


def local_bytes(rank: int, ranks: int) -> dict[str, int]:
    """Bytes of this rank's shards, sharded as a run shards."""
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, int] = {}
    for name in SHARDED:
        lm = CHECKPOINT_FAMILIES[name]()
        for layer in decoder_layers(lm):
            fully_shard(layer, mesh=mesh)
        fully_shard(lm, mesh=mesh)
        shards = [p.to_local() for p in lm.parameters() if isinstance(p, DTensor)]
        assert len(shards) == len(list(lm.parameters()))
        found[name] = sum(shard.nbytes for shard in shards)
    return found


def test_bytes_of_the_fullest_rank_are_those_of_fsdp(tmp_path: Path) -> None:
    ranks = 4
    each = run_ranks(local_bytes, ranks, tmp_path)
    for name in SHARDED:
        sizes = read_sizes(json.loads(CHECKPOINT_FAMILIES[name]().config.to_json_string()))
        assert sizes.parameter_bytes(4, ranks) == max(found[name] for found in each)
        assert sizes.parameter_bytes(4) == sum(found[name] for found in each)
