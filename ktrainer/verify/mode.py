"""Whether `ktrainer verify` runs this process, and what that means for its configuration.

It runs a script twice: once as configured, once in one process with the batch unsplit. What each
of them is told goes through the environment, as a script need not take words `key=value`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ktrainer.config import Config, LocalConfig
from ktrainer.errors import ConfigError

VARIABLE = "KTRAINER_VERIFY"
SEED = 0  # where the configuration has none


@dataclass(frozen=True)
class Asked:
    """What one of the two runs is to do.

    Attributes:
        role: "whole": one process, unsplit; "split": as configured.
        folder: where it writes what it has recorded, and finds what the other has.
        steps: updates to record.
    """

    role: Literal["whole", "split"]
    folder: str
    steps: int

    @property
    def initial(self) -> Path:
        """The weights that both begin with."""
        return Path(self.folder) / "initial.npz"

    def recorded(self, rank: int) -> Path:
        """What a rank has recorded."""
        return Path(self.folder) / f"{self.role}-{rank}.npz"

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class Verified(SystemExit):
    """Ends a script once its first updates are recorded."""

    def __init__(self) -> None:
        super().__init__(0)


def asked(environ: Mapping[str, str] = os.environ) -> Asked | None:
    """What `ktrainer verify` wants of this process; None in all others."""
    told = environ.get(VARIABLE)
    return Asked(**json.loads(told)) if told else None


def as_verified(config: Config) -> Config:
    """`config` as the run of `ktrainer verify` has it that this process belongs to: a few updates,
    and no files. As it is in all other processes.

    Raises:
        ConfigError: it has no unsplit equivalent.
    """
    told = asked()
    if told is None:
        return config
    refuse_own_batches(config)
    trainer = replace(
        config.trainer, fast_dev_run=told.steps * config.trainer.accumulate, steps_per_call=1
    )
    if told.role == "whole":
        trainer = replace(trainer, xla=False)
        config = config.with_changes(backend=LocalConfig(), world=replace(config.world, heal=False))
    return config.with_changes(
        trainer=trainer,
        seed=SEED if config.seed is None else config.seed,
        # Rates that depend on the number of processes are another training, on purpose.
        lr=replace(config.lr, scale="none", warmup=None),
        health=replace(config.health, verify="off", nan="ignore", spike=None, audit_every=None),
        checkpoint=replace(config.checkpoint, resume="never", every=None, best=None),
        logging=replace(config.logging, progress="none", csv=False, tensorboard=False, every="1ba"),
    )


def refuse_own_batches(config: Config) -> None:
    """Refuse a configuration that no single process equals.

    Raises:
        ConfigError: batches are each worker's own.
    """
    if config.data.batch == "per_worker":
        raise ConfigError(
            "batches that are each worker's own have no unsplit equivalent to verify against: "
            "verify with data.batch=global.",
            path="data.batch",
            value="per_worker",
        )


def seed_everything() -> None:
    """Seed what a script may draw from before it makes its Trainer."""
    import keras

    keras.utils.set_random_seed(SEED)
