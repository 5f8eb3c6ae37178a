"""How the trainer's models come to be.

from a folder          shapes on the meta device → packed policy → sharding → each rank reads its own bytes
from random weights    built whole on the host of every rank → packed policy → sharding
"""

import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.model.build import DTYPES, build_meta, build_random, model_folder, read_config
from plimsoll.model.policy import PackedPolicy
from plimsoll.model.probe import ProbeReport, probe
from plimsoll.model.spec import model_spec
from plimsoll.parallel.apply import apply
from plimsoll.parallel.tensors import load_full, local
from plimsoll.weights.buffers import rebuild_buffers
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.load import load_sharded
from plimsoll.weights.ties import empty_on


@dataclass(slots=True, kw_only=True, frozen=True)
class BuiltModel:
    """A sharded model with its weights."""

    policy: PackedPolicy
    files: WeightFiles | None
    """The open files that it was read from; None: no file holds these weights."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Builder:
    """What every model of a worker is built with."""

    recipe: Recipe
    plan: RunPlan
    mesh: DeviceMesh
    control: ControlGroup

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return torch.device(self.plan.device)

    def policy(self) -> BuiltModel:
        """The policy in the master dtype, sharded. RefusedError when its weights cannot be read or made."""
        model = self.recipe.model
        dtype = DTYPES[model.dtype]
        if model.path is not None:
            return self._read("model.path", model.path, dtype, trained=True)
        if model.init == "pretrained":
            raise RefusedError(
                "model.path is not set and model.init is 'pretrained'; set model.path or model.init=random"
            )
        policy = self._wrap(self._random(dtype, self.device))
        self._shard(policy, DTYPES[self.plan.compute_dtype], trained=True)
        return BuiltModel(policy=policy, files=None)

    def reference(self, built: BuiltModel) -> BuiltModel:
        """The reference in the compute dtype, sharded like the policy `built`, which has had no update yet.

        Read from `model.reference`, else from `model.path`; of a policy from random weights, those first weights. It
        shares the policy's open files where it reads the same folder.
        """
        model = self.recipe.model
        dtype = DTYPES[self.plan.compute_dtype]
        if model.reference is not None:
            return self._read("model.reference", model.reference, dtype, trained=False, opened=built.files)
        if model.init == "pretrained":
            assert model.path is not None, "the policy came from there"
            return self._read("model.path", model.path, dtype, trained=False, opened=built.files)
        return BuiltModel(policy=self._first_weights(built, dtype), files=None)

    def _read(
        self, setting: str, named: str, dtype: torch.dtype, *, trained: bool, opened: WeightFiles | None = None
    ) -> BuiltModel:
        with ExitStack() as unless_done, blamed_on(setting):

            def prepare() -> tuple[WeightFiles, PreTrainedModel]:
                folder = model_folder(named)
                if opened is not None and opened.folder == folder:
                    files = opened
                else:
                    files = unless_done.enter_context(WeightFiles(folder))
                return files, build_meta(folder, dtype, files=files)

            files, lm = self.control.together(prepare)
            policy = self._empty(lm, trained=trained)
            load_sharded(policy.lm, files, device=self.device, control=self.control)
            unless_done.pop_all()
        return BuiltModel(policy=policy, files=files)

    def _first_weights(self, built: BuiltModel, dtype: torch.dtype) -> PackedPolicy:
        """The policy's weights before its first update: copied shard by shard, or after a resume made from the seed."""
        reference = self._empty(build_meta(built.policy.lm.config, dtype), trained=False)
        rebuild_buffers(reference.lm, self.device)
        targets = own_tensors(reference.lm)
        if built.files is None:
            for name, source in own_tensors(built.policy.lm).items():
                local(targets[name]).copy_(local(source))
        else:
            first = self._random(DTYPES[self.recipe.model.dtype], torch.device("cpu"))
            for name, source in own_tensors(first).items():
                load_full(targets[name], source)
        return reference

    def _random(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """A resumed run has its config in its checkpoint, whatever has become of `model.config`."""
        source = self.recipe.model.path or self.recipe.model.config
        if source is None:
            raise RefusedError("model.init=random needs model.config for the shape of the model")
        return build_random(read_config(source), dtype, device, self.recipe.seed)

    def _empty(self, lm: PreTrainedModel, *, trained: bool) -> PackedPolicy:
        """Sharded, with memory for this rank's part and nothing in it."""
        lm.requires_grad_(trained)
        policy = self._wrap(lm)
        self._shard(policy, DTYPES[self.plan.compute_dtype], trained=trained)
        # From the root: only there FSDP2 pads the root group's uneven shards at once. Left to the first forward, that
        # would exchange the local tensors under whoever holds them, and copy embedding and head once more.
        empty_on(policy, self.device)
        return policy

    def _wrap(self, lm: PreTrainedModel) -> PackedPolicy:
        plan, asked = self.plan, self.recipe.model
        if plan.packing == "packed" and plan.device == "cpu":
            raise RefusedError(
                f"model.packing={asked.packing}: packed rows need torch's variable-length kernel, which has no CPU "
                "version; set model.packing=padded (or auto)"
            )
        if plan.packing == "packed" and plan.compute_dtype != "bfloat16":
            raise RefusedError(
                f"model.packing={asked.packing}: the variable-length kernel takes 16-bit numbers, and "
                f"model.compute_dtype is {plan.compute_dtype}; set model.packing=padded or model.compute_dtype=bfloat16"
            )
        return PackedPolicy(lm, model_spec(lm), packing=plan.packing, chunk=plan.logprob_chunk)

    def _shard(self, policy: PackedPolicy, compute_dtype: torch.dtype, *, trained: bool) -> None:
        apply(
            policy,
            self.mesh,
            compute_dtype=compute_dtype,
            activation_checkpointing=self.plan.activation_checkpointing if trained else "none",
            compile_layers=self.recipe.train.compile,
            trained=trained,
            default_stream_gather=self.recipe.memory.default_stream_gather,
        )


@contextmanager
def blamed_on(setting: str) -> Generator[None]:
    """A refusal from inside names the setting that led there."""
    try:
        yield
    except RefusedError as error:
        plain = [re.sub(r"^model\.(path|config): ", "", cause) for cause in error.causes]
        # A cause may also begin with the name of a tensor, such as model.norm.weight.
        causes = [cause if re.match(r"model\.\w+[:=]", cause) else f"{setting}: {cause}" for cause in plain]
        raise RefusedError(causes) from error


def probe_policy(policy: PackedPolicy, recipe: Recipe, plan: RunPlan, temperature: float) -> ProbeReport:
    """Ask the probe's questions; it may change the policy's packing."""
    return probe(
        policy,
        requested=recipe.model.packing,
        vocab=int(policy.lm.config.vocab_size),
        dtype=DTYPES[plan.compute_dtype],
        device=torch.device(plan.device),
        temperature=temperature,
    )


def own_tensors(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the name that transformers saves, once each: a tied head is left out."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own


def own_parameters(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable ones of `own_tensors`."""
    return {name: t for name, t in own_tensors(lm).items() if isinstance(t, nn.Parameter) and t.requires_grad}
