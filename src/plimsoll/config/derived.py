"""What follows from recipe, data and machine: the second frozen object, saved as RUN/plan.json.

A resumed run reads these numbers from its own plan.json instead of deriving them again, so that another machine or a
newer default cannot change them in the middle of a run. Only the memory plan is made anew, around the kept numbers: it
must fit the machine that the run goes on with.
"""

from typing import Literal

from plimsoll.config.base import Section
from plimsoll.config.planned import MemoryPlan


class RunPlan(Section):
    """Numbers that depend on the machine and the data; no default anywhere."""

    steps: int
    """Iterations of the loop."""
    optimizer_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    device: Literal["cpu", "cuda"]
    """Where the model lives."""
    threads: int
    """CPU threads of torch."""
    compute_dtype: Literal["float32", "float64", "bfloat16"]
    """Forward, backward and generation."""
    packing: Literal["packed", "padded", "single"]
    """Attention over packed rows, after the probe."""
    activation_checkpointing: Literal["none", "full", "selective"]
    """Which layers are recomputed in backward."""
    token_budget: int
    """Tokens of one micro-batch at most (one longer sequence goes alone)."""
    logprob_chunk: int
    """Tokens whose logits exist at the same time."""
    num_slots: int
    """Sequences that the native engine holds at once."""
    slot_tokens: int
    """Tokens of one slot: longest prompt + longest response."""
    kv_bytes: int
    """Bytes of the KV cache: slots x tokens x bytes a token."""
    optimizer_state: Literal["device", "streamed"]
    """Where AdamW's moments live. A resumed run may take another place: the bits are the same."""
    reference_placement: Literal["device", "page_cache", "ring", "arena"]
    """Where a frozen reference is between its passes; likewise."""
    memory: MemoryPlan | None
    """Bytes of every phase, and what is moved for it. None: written by a version that did not plan them."""
    reference: str | None
    """Folder of the frozen reference; None: no KL, or the policy's own first weights from random."""
    stop_token_ids: tuple[int, ...]
    """Ids that end a response."""


ADDED = {"optimizer_state": "device", "reference_placement": "device", "memory": None}
"""What plans of earlier versions lack. A resumed run decides these anew in any case."""
