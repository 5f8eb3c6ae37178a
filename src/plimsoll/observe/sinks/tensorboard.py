"""TensorBoard events in RUN/tensorboard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Every number of a row as a scalar under its own key."""

    name = "tensorboard"

    def __init__(self, folder: Path, recipe: Mapping[str, Any], *, start_step: int, resumed: bool) -> None:
        # TensorBoard drops what an earlier file has from purge_step on: steps that a resumed run does again. Step 0 is
        # written by the evaluation before the first step, which a run that starts there redoes.
        purge = (start_step + 1 if start_step else 0) if resumed else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)  # pyright: ignore[reportUnknownVariableType]
        self._writer.add_text("recipe", f"```json\n{json.dumps(recipe, indent=2)}\n```", start_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        for key, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()  # people look while the run goes on

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
