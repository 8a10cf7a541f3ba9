"""What each rank counted by itself: its metrics' states, and the examples behind them.

They are no part of the state that all ranks share, and would be gone with a rank; so the ranks tell
each other after each update, in the message by which they agree on going on.
"""

from __future__ import annotations

import keras
import numpy as np

from ktrainer.checkpoint.encoding import dtype_named

_MOST = 1 << 16  # numbers a rank that are told after each update


class Counts:
    """The metrics of one model.

    Args:
        model: built, with its metrics.
    """

    def __init__(self, model: keras.Model) -> None:
        self._variables = list(model.metrics_variables)
        self._sizes = [int(np.prod(v.shape)) for v in self._variables]
        self.told = sum(self._sizes) <= _MOST

    def row(self) -> np.ndarray:
        """All states as one float64 vector; nothing where they are too many to be told."""
        if not self.told or not self._variables:
            return np.zeros(0)
        return np.concatenate([np.ravel(v.numpy()).astype(np.float64) for v in self._variables])

    def states(self, row: np.ndarray | None = None) -> list[np.ndarray]:
        """The states in a `row`, in their shapes and types; None: those of now."""
        if row is None:
            return [np.array(v.numpy()) for v in self._variables]
        parts = np.split(row, np.cumsum(self._sizes)[:-1])
        pairs = zip(self._variables, parts, strict=True)
        return [p.reshape(tuple(v.shape)).astype(dtype_named(v.dtype)) for v, p in pairs]

    def add(self, row: np.ndarray) -> None:
        """Count what another rank had counted."""
        if not row.size:
            return
        ends = np.cumsum(self._sizes)
        for variable, part in zip(self._variables, np.split(row, ends[:-1]), strict=True):
            mine = variable.numpy()
            variable.assign((mine + part.reshape(mine.shape)).astype(mine.dtype))

    def assign(self, row: np.ndarray) -> None:
        """Count this and nothing else."""
        for variable in self._variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        self.add(row)
