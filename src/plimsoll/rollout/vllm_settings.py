"""What vLLM is asked for, as plain values: arguments of the engine, parameters of a request. Imports no vLLM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from plimsoll.errors import RefusedError
from plimsoll.types import Request, SamplingParams

MAX_SEQUENCES = 1024
"""Sequences in flight at once. Above it, CUDA graphs and per-sequence buffers grow and throughput no longer does."""
TEMPERATURES = (0.01, 2.0)
"""vLLM raises a smaller temperature to the first without failing, and refuses one above the second."""


@dataclass(slots=True, kw_only=True, frozen=True)
class VllmSettings:
    """What the run knows about its engine."""

    config: Mapping[str, Any]
    """config.json of the policy, as transformers would save it."""
    architecture: str
    """Name of the model's class, for example Qwen2ForCausalLM."""
    dtype: str
    """Of weights, activations and KV cache, for example bfloat16."""
    kv_bytes: int
    """Of the KV cache."""
    slot_tokens: int
    """Prompt + response of one sequence at most."""
    num_sequences: int
    """In flight at once; more wait in the engine's queue."""
    prefill_tokens: int
    """Tokens that go through the model in one step at most."""
    cuda_graphs: bool
    """Capture the decode step."""
    seed: int


def write_model_folder(folder: Path, settings: VllmSettings) -> None:
    """Write the folder that the engine is built from: config.json, and neither weights nor tokenizer."""
    values = dict(settings.config) | {"architectures": [settings.architecture], "dtype": settings.dtype}
    values.pop("_name_or_path", None)  # vLLM would look for files there
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def engine_arguments(settings: VllmSettings, folder: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    num_sequences = min(settings.num_sequences, MAX_SEQUENCES)
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,  # ids in, ids out
        "load_format": "dummy",  # the first sync brings the weights
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.slot_tokens,
        "max_num_seqs": num_sequences,
        "max_num_batched_tokens": max(settings.prefill_tokens, num_sequences),  # vLLM refuses less than a token each
        "kv_cache_memory_bytes": settings.kv_bytes,
        # With the KV cache in bytes vLLM sizes nothing by this share, but refuses to start where so much is not free:
        # under a trainer that has taken its part, the default of nine tenths never is.
        "gpu_memory_utilization": 0.01,
        "enable_sleep_mode": True,
        "enable_prefix_caching": True,  # the samples of a group share their prompt
        "enforce_eager": not settings.cuda_graphs,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "generation_config": "vllm",  # nothing comes from the model's generation_config.json
        "disable_log_stats": True,
        "trust_remote_code": False,
    }


def check_temperature(temperature: float) -> None:
    """RefusedError for one that vLLM would change in silence or not take."""
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise RefusedError(
            f"temperature {temperature:g}: vLLM takes 0 (greedy) or {low:g} to {high:g}; set"
            " rollout.temperature (or rollout.eval.temperature) to one of these, or rollout.engine=native"
        )


def sampling_arguments(params: SamplingParams, seed: int | None) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams, complete: no default of vLLM decides anything.

    RefusedError for a temperature that vLLM would change in silence or not take.
    """
    check_temperature(params.temperature)
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,  # 0 is off, as here
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": params.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # all ids that stop are in the line above; the end-of-sequence id need not be one
        "detokenize": False,
        "logprobs": 0,  # of the sampled token, and of no other
        "flat_logprobs": True,  # lists of numbers instead of an object a token
        "seed": seed,
    }


def request_seed(request: Request, version: int) -> int:
    """63 bits that belong to (seed, policy version, group, sample); vLLM's draw adds the position.

    The same request under the same weights is drawn with the same noise, whatever runs beside it. That does not make
    runs of vLLM equal to the bit: its kernels round by batch shape, and a near tie may fall the other way.
    """
    key = f"{request.seed}/{version}/{request.sample_id}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def check_request(request: Request, slot_tokens: int) -> None:
    """RefusedError when a request does not fit."""
    length, room = len(request.token_ids), request.params.max_tokens
    if length < 1 or room < 1:
        raise RefusedError(
            f"sample {request.sample_id}: {length} prompt tokens and {room} response tokens; both must be at least 1"
            " (data.train, rollout.max_response_tokens)"
        )
    if length + room > slot_tokens:
        raise RefusedError(
            f"sample {request.sample_id}: {length} prompt tokens + {room} response tokens do not fit into the engine's"
            f" {slot_tokens}; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
