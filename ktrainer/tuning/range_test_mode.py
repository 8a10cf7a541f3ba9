"""Whether `ktrainer lr-find` runs this process, and what that means for its configuration.

The request is in the environment, as a script need not take words `key=value`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ktrainer.config import Config

VARIABLE = "KTRAINER_LR_FIND"
_ENDLESS = 10**9  # updates or epochs: the callback ends the test, also after an `initial_epoch`


@dataclass(frozen=True)
class RangeTest:
    """A learning-rate range test (Smith, 2017).

    Attributes:
        folder: for its result.
        lowest, highest: learning rates of the first and the last update.
        updates: how many there are; the rate grows by the same factor in each.
    """

    folder: str
    lowest: float
    highest: float
    updates: int

    @property
    def result(self) -> Path:
        """The file with rates and losses, which rank 0 writes."""
        return Path(self.folder) / "rates.json"

    def rates(self) -> list[float]:
        """The rate of each update."""
        growth = self.highest / self.lowest
        return [self.lowest * growth ** (k / (self.updates - 1)) for k in range(self.updates)]

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class RangeTestDone(SystemExit):
    """Ends a script once the rates are tested."""

    def __init__(self) -> None:
        super().__init__(0)


def current_range_test(environ: Mapping[str, str] = os.environ) -> RangeTest | None:
    """The range test that this process belongs to; None where there is none."""
    given = environ.get(VARIABLE)
    return RangeTest(**json.loads(given)) if given else None


def configure_for_range_test(config: Config) -> Config:
    """`config` for the range test that this process belongs to: its updates, and no files but in
    its folder. Unchanged where there is none."""
    test = current_range_test()
    if test is None:
        return config
    trainer = replace(
        config.trainer,
        epochs=_ENDLESS,
        max_steps=_ENDLESS,
        max_time=None,
        limit_val_batches=0,
        fast_dev_run=0,
        steps_per_call=1,
    )
    changed = config.with_changes(
        run=replace(config.run, dir=str(Path(test.folder) / "run")),
        trainer=trainer,
        lr=replace(config.lr, scale="none", warmup=None, schedule=[]),
        health=replace(config.health, verify="off", nan="ignore", spike=None, audit_every=None),
        checkpoint=replace(config.checkpoint, resume="never", every=None, best=None),
        logging=replace(config.logging, progress="none", csv=False, tensorboard=False, every="1ba"),
    )
    # Over the arguments of the script's `fit`, as keys of the command line are.
    origins = dict.fromkeys(("trainer.epochs", "trainer.limit_val_batches"), "ktrainer lr-find")
    object.__setattr__(changed, "_origins", {**config._origins, **origins})
    return changed
