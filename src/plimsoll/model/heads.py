"""Critics and reward models: the base of a language model with a small linear head instead of the one over tokens.

    reward model   AutoModelForSequenceClassification   one score a sequence   head `score`
    critic         AutoModelForTokenClassification      one value a token      head `score`, in GPT-2 `classifier`

Both are transformers' own classes, so that what is saved loads anywhere with `from_pretrained`. Their weights come from
a language model, whose own head is left aside and the new one made fresh, or whole from a saved critic or reward model.
"""

import logging
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from plimsoll.model.build import build_meta
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import LoadReport, load_sharded
from plimsoll.weights.ring import StagingRing

logger = logging.getLogger(__name__)


def build_sequence_classifier(
    source: Path | PreTrainedConfig, dtype: torch.dtype, *, num_labels: int = 1
) -> PreTrainedModel:
    """A reward model on the meta device, in evaluation mode: `num_labels` scores at the last token of each sequence.

    `source`: a Hugging Face folder of a language model or of a saved reward model, or its config. RefusedError: its
    family has no such class in transformers. Shard it, then `load_with_head`.
    """
    return build_meta(source, dtype, auto_class="sequence_classification", num_labels=num_labels)


def build_value_model(source: Path | PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A critic on the meta device, in evaluation mode: logits [1, T, 1] are the values of a row of T tokens.

    `source`: a Hugging Face folder of a language model or of a saved critic, or its config. RefusedError: its family
    has no such class in transformers. Its classes drop out a tenth of the last hidden states in training mode; leave it
    in evaluation mode, as the policy is. Shard it, then `load_with_head`.
    """
    return build_meta(source, dtype, auto_class="token_classification", num_labels=1)


def heads_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules with parameters that lie beside the base model."""
    return tuple(
        name
        for name, module in model.named_children()
        if module is not model.base_model and any(True for _ in module.parameters())
    )


def load_with_head(
    model: PreTrainedModel,
    source: Path | WeightFiles,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    ring: StagingRing | None = None,
    threads: int | None = None,
    control: ControlGroup | None = None,
) -> LoadReport:
    """Load a critic or reward model with `load_sharded`; a head that `source` lacks is made fresh, which is logged.

    A fresh head depends on `seed` and its name alone: it is the same for every number of ranks.

    Raises what `load_sharded` raises: anything else that is missing, unexpected or of another shape is an error.
    """
    report = load_sharded(
        model, source, device=device, ring=ring, threads=threads, fresh=heads_of(model), seed=seed, control=control
    )
    if report.fresh and (control is None or control.rank == 0):
        aside = f"; {', '.join(report.left_out)} left aside" if report.left_out else ""
        where = source.folder if isinstance(source, WeightFiles) else source
        logger.info("%s: new head %s, initialised from seed %d%s", where, ", ".join(report.fresh), seed, aside)
    return report
