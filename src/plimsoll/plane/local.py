"""The local plane: columns of samples in a dict of this process."""

from collections.abc import Iterable

from torch import Tensor

from plimsoll.types import DataRef


class LocalPlane:
    """Columns by sample. Every column of a sample has shape [L]."""

    def __init__(self) -> None:
        self._columns: dict[DataRef, dict[str, Tensor]] = {}

    def put(self, ref: DataRef, **columns: Tensor) -> None:
        """Add or replace columns of one sample; all of them must have the length of those already there."""
        held = self._columns.setdefault(ref, {})
        lengths = {len(column) for column in (*held.values(), *columns.values())}
        assert len(lengths) <= 1, f"columns of {ref.key} differ in length: {sorted(lengths)}"
        held.update(columns)

    def get(self, ref: DataRef, column: str) -> Tensor:
        """The column, shape [L]."""
        return self._columns[ref][column]

    def has(self, ref: DataRef, column: str) -> bool:
        """Whether the sample has the column."""
        return column in self._columns.get(ref, {})

    def drop(self, refs: Iterable[DataRef]) -> None:
        """Forget samples; unknown ones are ignored."""
        for ref in refs:
            self._columns.pop(ref, None)

    def __len__(self) -> int:
        return len(self._columns)
