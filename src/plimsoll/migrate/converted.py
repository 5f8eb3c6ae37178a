"""A recipe as it grows out of another framework's settings, and what found no place in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.migrate.settings import Settings


@dataclass(slots=True, kw_only=True, frozen=True)
class NotConverted:
    """One setting that the recipe does not have."""

    key: str
    value: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Converted:
    """Sections with their values, in the order in which they were put."""

    settings: Settings
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    left: dict[str, NotConverted] = field(default_factory=dict[str, NotConverted])

    def put(self, key: str, value: Any) -> None:
        """Set a key of the recipe."""
        *sections, name = key.split(".")
        place = self.recipe
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value

    def leave(self, key: str, reason: str, *, always: bool = False) -> None:
        """Name a setting of theirs that has no counterpart; only if the script sets it, unless `always`."""
        value = self.settings.raw(key)
        if self.settings.given(key) or always:
            shown = "(default)" if not self.settings.given(key) else value if value is not None else "null"
            named = self.settings.arguments[key].key if self.settings.given(key) else key  # as the script has it
            self.left.setdefault(key, NotConverted(key=named, value=shown, reason=reason))

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Name every setting of the script whose key is one of these, or lies below one of them and was not read."""
        for key in self.settings.arguments:
            for prefix, reason in reasons.items():
                below = key.startswith(f"{prefix}.") and (key not in self.settings.read or prefix == "critic")
                if key == prefix or below:
                    self.leave(key, reason)
                    break
