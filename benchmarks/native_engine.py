"""Tokens per second of the native engine, transformers' `generate` and its continuous batching, on the same work.

    python benchmarks/native_engine.py --json
    python benchmarks/native_engine.py --json --device cuda --hidden 1536 --layers 28 --max-tokens 256 --num-slots 256

Work: `--prompts` prompts x `--samples` samples, `--max-tokens` tokens each, no stop token, temperature 1, the full
distribution, log-probabilities where the peer returns them. All three run in this process, with the same weights and
threads, in turns; each is run once to warm up and then `--repeats` times. The last line is one JSON object; every value
in `tokens_per_second` is a median, and `ratio` is ours over the peer's.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from plimsoll.rollout.kv import kv_bytes_per_token
from plimsoll.rollout.native import NativeEngine
from plimsoll.types import GroupId, Request, SampleId, SamplingParams


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--model", type=Path, help="folder of a model; without it a random one of the sizes below")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--num-slots", type=int, default=256, help="sequences at once, for all three")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"], help="default: bfloat16 on cuda")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], choices=["generate", "continuous_batching"])
    return parser.parse_args()


def builder(args: argparse.Namespace) -> Callable[[], PreTrainedModel]:
    """A function that builds the same model every time."""
    name = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if args.model is not None:
        return lambda: AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=max(64, args.prompt_tokens + args.max_tokens),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(args.device):
            return Qwen2ForCausalLM(config).to(dtype).eval()

    return build


def native(model: PreTrainedModel, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], int]:
    """Our engine; the cache is allocated once, as in training."""
    slot_tokens = args.prompt_tokens + args.max_tokens
    engine = NativeEngine(model, num_slots=args.num_slots, slot_tokens=slot_tokens, prefill_tokens=8192)
    assert engine.kv_bytes == args.num_slots * slot_tokens * kv_bytes_per_token(model.config, model.dtype)
    params = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, stop_token_ids=())
    requests = [
        Request(
            sample_id=SampleId(group=GroupId(epoch=0, row=row), index=index),
            token_ids=tuple(prompt),
            params=params,
            seed=0,
        )
        for row, prompt in enumerate(prompts)
        for index in range(args.samples)
    ]

    def run() -> int:
        engine.set_version(engine.version + 1)  # as after an update: prompts are computed anew
        engine.add(requests)
        tokens = 0
        while not engine.idle:
            tokens += sum(len(done.token_ids) for done in engine.step())
        return tokens

    return run


def generation(args: argparse.Namespace) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=args.max_tokens,
        min_new_tokens=None,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )


def generate(model: PreTrainedModel, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], int]:
    """transformers' own loop, in static batches of `--num-slots`. It returns no log-probabilities here."""
    config = generation(args)
    rows = torch.tensor([prompt for prompt in prompts for _ in range(args.samples)], device=args.device)

    def run() -> int:
        tokens = 0
        for start in range(0, len(rows), args.num_slots):
            batch = rows[start : start + args.num_slots]
            out = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
            tokens += out[:, batch.shape[1] :].numel()
        return tokens

    return run


def continuous_batching(
    model: PreTrainedModel, prompts: list[list[int]], args: argparse.Namespace
) -> Callable[[], int]:
    """transformers' continuous batching, with a cache for `--num-slots` sequences."""
    config = generation(args)
    rows = [prompt for prompt in prompts for _ in range(args.samples)]
    # Blocks of 32 tokens where the field exists under this name; without num_blocks it takes what memory is free.
    per_sequence = -(-(args.prompt_tokens + args.max_tokens) // 32) + 1
    batching = ContinuousBatchingConfig(
        num_blocks=args.num_slots * per_sequence,
        max_batch_tokens=max(4096, args.num_slots),
        use_cuda_graph=args.device == "cuda",
        return_logprobs=True,
    )

    def run() -> int:
        out = model.generate_batch(
            inputs=rows, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        return sum(len(done.generated_tokens) for done in out.values())

    return run


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second, run by run; the engines take turns, so that a slow minute hits all of them."""
    rng, build = random.Random(0), builder(args)
    vocab = build().config.get_text_config().vocab_size
    prompts = [[rng.randrange(3, vocab) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    makers = {"native": native, "generate": generate, "continuous_batching": continuous_batching}
    runs = {name: make(build(), prompts, args) for name, make in makers.items() if name not in args.skip}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            gc.collect()
            begin = time.perf_counter()
            tokens = run()
            seconds = time.perf_counter() - begin
            print(f"{name} {repeat}: {tokens} tokens in {seconds:.2f} s", file=sys.stderr)
            assert tokens == args.prompts * args.samples * args.max_tokens, f"{name} made {tokens} tokens"
            if repeat:
                rates[name].append(tokens / seconds)
    return rates


def main() -> None:
    args = arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rates = measure(args)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "benchmark": "native_engine",
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "runs": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "ratio": {name: round(medians["native"] / value, 2) for name, value in medians.items() if name != "native"},
        "work": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
