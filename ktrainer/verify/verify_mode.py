"""Whether `ktrainer verify` runs this process, and what that means for its configuration.

It runs a script twice: once as configured, once in one process with the batch unsplit. What each
of them needs is in the environment, as a script need not take words `key=value`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ktrainer.config import Config, LocalConfig
from ktrainer.config.schema import WatchConfig
from ktrainer.errors import ConfigError

VARIABLE = "KTRAINER_VERIFY"  # also in ktrainer.launch.rank_process
SEED = 0  # where the configuration has none


@dataclass(frozen=True)
class VerifyRun:
    """One of the two runs of `ktrainer verify`.

    Attributes:
        role: "unsplit": one process; "split": as configured.
        folder: of the records of both runs.
        steps: updates to record.
    """

    role: Literal["unsplit", "split"]
    folder: str
    steps: int

    @property
    def initial(self) -> Path:
        """The weights that both begin with."""
        return Path(self.folder) / "initial.npz"

    def recorded(self, rank: int) -> Path:
        """The record of a rank."""
        return Path(self.folder) / f"{self.role}-{rank}.npz"

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class RecordingDone(SystemExit):
    """Ends a script once its first updates are recorded."""

    def __init__(self) -> None:
        super().__init__(0)


def current_verify_run(environ: Mapping[str, str] = os.environ) -> VerifyRun | None:
    """The run of `ktrainer verify` that this process belongs to; None where there is none."""
    given = environ.get(VARIABLE)
    return VerifyRun(**json.loads(given)) if given else None


def configure_for_verify(config: Config) -> Config:
    """`config` for the run of `ktrainer verify` that this process belongs to: a few updates, and no
    files. Unchanged where there is none.

    Raises:
        ConfigError: it has no unsplit equivalent.
    """
    run = current_verify_run()
    if run is None:
        return config
    refuse_own_batches(config)
    trainer = replace(
        config.trainer, fast_dev_run=run.steps * config.trainer.accumulate, steps_per_call=1
    )
    if run.role == "unsplit":
        trainer = replace(trainer, xla=False)
        config = config.with_changes(
            backend=LocalConfig(), world=replace(config.world, heal=False, min_size=1)
        )
    return config.with_changes(
        trainer=trainer,
        seed=SEED if config.seed is None else config.seed,
        # Rates that depend on the number of processes are another training, on purpose.
        lr=replace(config.lr, scale="none", warmup=None),
        watch=WatchConfig(),  # speed, memory and bytes sent differ between any two runs
        health=replace(config.health, verify="off", nan="ignore", spike=None, audit_every=None),
        checkpoint=replace(config.checkpoint, resume="never", every=None, best=None),
        logging=replace(config.logging, progress="none", csv=False, tensorboard=False, every="1ba"),
    )


def refuse_own_batches(config: Config) -> None:
    """Refuse a configuration that no single process equals.

    Raises:
        ConfigError: batches, or layers, are each worker's own; gradients are approximated.
    """
    if getattr(config.backend, "local_layers", None):
        raise ConfigError(
            "layers that are each rank's own have no equivalent in one process to verify against: "
            "verify without backend.local_layers.",
            path="backend.local_layers",
            value=config.backend.local_layers,  # type: ignore[attr-defined]
        )
    if getattr(config.backend, "low_rank", None) is not None:
        raise ConfigError(
            "PowerSGD applies other gradients than one process does: verify with "
            "backend.compression=none.",
            path="backend.compression",
            value="powersgd",
        )
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
