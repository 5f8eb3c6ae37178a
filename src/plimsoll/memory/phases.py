"""The phases of a step. What is on the device, and what is measured, is said per phase."""

from enum import StrEnum


class Phase(StrEnum):
    """One stretch of a step between two borders; the value is the word in memory.jsonl and on the console."""

    LOAD = "load"
    ROLLOUT = "rollout"
    LOGPROB = "logprob"
    REFERENCE = "reference"
    UPDATE = "update"
    SYNC = "sync"
    SAVE = "save"
    EXPORT = "export"
    EVAL = "eval"

    @property
    def log_name(self) -> str:
        """The word after "After" in the log lines, as people know it from their logs of RL runs."""
        return _LOG_NAMES[self]


_LOG_NAMES = {
    Phase.LOAD: "init_model",
    Phase.ROLLOUT: "generate_sequences",
    Phase.LOGPROB: "compute_log_prob",
    Phase.REFERENCE: "compute_ref_log_prob",
    Phase.UPDATE: "update_actor",
    Phase.SYNC: "update_weights",
    Phase.SAVE: "save_checkpoint",
    Phase.EXPORT: "export",
    Phase.EVAL: "evaluate",
}
