"""Numbers of a config.json with the defaults of its family, and refusals that name the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import RefusedError


def load_values(config: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Contents of a config.json, of a folder that holds one, or what is given. RefusedError: no such file, no JSON."""
    if isinstance(config, Mapping):
        return config
    file = config / "config.json" if config.is_dir() else config
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RefusedError(f"model.config: {config} is neither a config.json nor a folder with one") from None
    except (OSError, ValueError) as error:
        raise RefusedError(f"model.config: {file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise RefusedError(f"model.config: {file} holds no JSON object")
    return cast("dict[str, Any]", values)


class Values:
    """A family's config. `defaults` are those of its class in transformers, for keys that files may leave out; a key
    without a default must be there."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], family: str) -> None:
        self._values = values
        self._defaults = defaults
        self.family = family

    def get(self, *keys: str) -> Any:
        """The first of several names of one setting that the file has, else the default of the first name.

        Null in the file stays None, as in transformers: it is not the default.
        """
        for key in keys:
            if key in self._values:
                return self._values[key]
        if keys[0] not in self._defaults:
            raise self.refusal(f"does not say `{keys[0]}`")
        return self._defaults[keys[0]]

    def number(self, *keys: str) -> int:
        """A positive whole number."""
        value = self.optional(*keys)
        if value is None:
            raise self.refusal(f"has no number at `{keys[0]}`")
        return value

    def optional(self, *keys: str) -> int | None:
        """A positive whole number, or null."""
        value = self.get(*keys)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.refusal(f"has {value!r} at `{keys[0]}`, where a positive whole number is needed")
        return value

    def count(self, *keys: str) -> int:
        """A whole number; null is 0."""
        return 0 if self.get(*keys) in (0, None) else self.number(*keys)

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"has {value!r} at `{key}`, where true or false is needed")
        return bool(value)

    def entries(self, key: str) -> list[Any] | None:
        """A list, or None where the file has none."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refusal(f"has {value!r} at `{key}`, where a list is needed")
        return cast("list[Any] | None", value)

    def refusal(self, what: str) -> RefusedError:
        """The error of a config that `what` is wrong with."""
        return RefusedError(
            f"model.config: the config.json of model_type {self.family!r} {what}, so the model's size is not known"
        )
