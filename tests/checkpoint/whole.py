"""A whole checkpoint written, and a whole state restored, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.restore_state import assign_state, pair_variables
from ktrainer.checkpoint.format.checkpoint_folder import (
    finish_checkpoint,
    temporary_checkpoint,
    write_arrays,
)
from ktrainer.distributed import World
from ktrainer.state.progress import Progress


def write_checkpoint(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    state: Mapping[str, Any] | bytes,
    facts: Mapping[str, Any] | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> None:
    with temporary_checkpoint(Path(path)) as temporary:
        described = write_arrays(temporary, arrays)
        finish_checkpoint(temporary, path, described, state, facts, texts)


def restore_state(
    model: Any, arrays: Any, state: Mapping[str, Any], world: World, callbacks: Iterable[Any] = ()
) -> Progress:
    pairs = pair_variables(model, arrays, state, world)
    return assign_state(model, pairs, arrays, state, world, callbacks=callbacks)
