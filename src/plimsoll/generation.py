"""The sampling half of a run: engine, its weights, scoring processes, collector, evaluation."""

from collections.abc import Callable, Sequence

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.engines import EngineSide
from plimsoll.memory.resident import Resident
from plimsoll.plane.local import LocalPlane
from plimsoll.reward.shaping import overlong_penalty
from plimsoll.rollout.collector import Collector, CollectorSettings
from plimsoll.rollout.evaluation import EvalResult, evaluate
from plimsoll.types import Prompt, SamplingParams, Scorer


class Generation:
    """Samples with the policy's weights: groups for training, responses for evaluation."""

    def __init__(
        self,
        recipe: Recipe,
        plan: RunPlan,
        *,
        side: EngineSide,
        scorer: Scorer,
        plane: LocalPlane,
        decode: Callable[[Sequence[int]], str],
        eval_prompts: Sequence[Prompt],
    ) -> None:
        self._recipe = recipe
        self._plan = plan
        self._side = side
        self._scorer = scorer
        self._decode = decode
        self.eval_prompts = tuple(eval_prompts)
        self.collector = Collector(
            engine=side.engine,
            scorer=scorer,
            plane=plane,
            decode=decode,
            settings=collector_settings(recipe, plan.stop_token_ids),
        )

    def sampling_line(self) -> str:
        """What responses are sampled with, for the log: users look for settings that came from elsewhere."""
        rollout = self._recipe.rollout
        return (
            f"sampling: temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k or 'off'}, "
            f"repetition_penalty 1.0, at most {rollout.max_response_tokens} tokens, stop ids "
            f"{list(self._plan.stop_token_ids)}; nothing is taken from the model's generation_config.json"
        )

    def sync(self) -> None:
        """Bring the engine to the policy's weights and version; the engine must be idle."""
        self._side.sync()

    @property
    def version(self) -> int:
        """Policy version of the engine's weights; -1: it has none."""
        return self._side.version

    def evaluate(self, stop: Callable[[], bool]) -> EvalResult:
        """Held-out accuracy with the weights of the last sync. GenerationStopped when `stop` says so."""
        rollout = self._recipe.rollout
        return evaluate(
            self._side.engine,
            self._scorer,
            self.eval_prompts,
            sampling=rollout.eval,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self._plan.stop_token_ids,
            seed=self._recipe.seed,
            decode=self._decode,
            stop=stop,
        )

    def residents(self) -> list[Resident]:
        """What the engine holds."""
        return self._side.residents()

    @property
    def borrowed(self) -> frozenset[str]:
        """Residents that the trainer's own parameters stand in for."""
        return self._side.borrowed


def collector_settings(recipe: Recipe, stop_token_ids: tuple[int, ...]) -> CollectorSettings:
    """How groups are sampled and their scores shaped."""
    rollout, algorithm = recipe.rollout, recipe.algorithm

    def length_penalty(response_length: int) -> float:
        if algorithm.overlong_buffer == 0:
            return 0.0
        return overlong_penalty(
            response_length,
            max_tokens=rollout.max_response_tokens,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )

    return CollectorSettings(
        samples_per_prompt=rollout.samples_per_prompt,
        params=SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
        ),
        seed=recipe.seed,
        overlong_filter=algorithm.overlong_filter,
        length_penalty=length_penalty,
    )
