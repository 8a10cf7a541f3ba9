"""Progress of a run: plain counters, the same on every rank, that a checkpoint can carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """How much of an update is over.

    Attributes:
        UPDATED: the weights are; callbacks have not all heard of it.
        CALLBACKS_DONE: callbacks have heard of it, and all ranks have voted on whether to stop.
        EPOCH_ENDED: the end of its epoch is over too.
    """

    UPDATED = 0
    CALLBACKS_DONE = 1
    EPOCH_ENDED = 2


@dataclass(slots=True)
class Progress:
    """Counters of one run.

    Attributes:
        epoch: epochs finished.
        batch: updates done in the current epoch.
        begun: whether callbacks have heard of the current epoch's begin.
        step: updates done in all.
        examples: examples seen in all, summed over ranks.
        counted: updates that the metrics of the current epoch hold: not those that were left out,
            nor those before a rollback.
        elapsed: seconds spent in `fit`, over all restarts.
        validation_due: whether the validation inside the epoch that belongs to this step is still
            to be done: the run was interrupted in it.
        validations: how many validations are over, inside epochs and after them.
        validated: logs of that validation, if there was one after the newest update: where an epoch
            ends with it, they are the epoch's too.
    """

    epoch: int = 0
    batch: int = 0
    begun: bool = False
    step: int = 0
    examples: int = 0
    counted: int = 0
    elapsed: float = 0.0
    validation_due: bool = False
    validations: int = 0
    validated: dict[str, Any] = field(default_factory=dict)

    def advance(self, examples: int) -> None:
        """Count one update that consumed `examples` over all ranks."""
        self.batch += 1
        self.step += 1
        self.examples += examples
        self.counted += 1
        self.validated = {}

    def finish_epoch(self) -> None:
        """Count the end of an epoch."""
        self.epoch += 1
        self.batch = self.counted = 0
        self.begun, self.validated = False, {}

    @property
    def moment(self) -> tuple[int, ...]:
        """Key that is equal for two moments with the same state."""
        return self.epoch, self.batch, self.step, self.counted, self.validation_due

    def to_dict(self) -> dict[str, Any]:
        """The counters as a JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `to_dict`; unknown keys are ignored."""
        batch = values.get("batch", 0)
        values = {"counted": batch, "begun": batch > 0, **values}  # older ones do not say
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
