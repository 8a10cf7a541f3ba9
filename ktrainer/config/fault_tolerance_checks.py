"""Contradictions between `world.heal` or `health` and the other keys."""

from __future__ import annotations

from ktrainer.config.backend_keys import (
    DataParallelConfig,
    PipelineConfig,
    TfDistributeConfig,
)
from ktrainer.config.schema import Config, WorldConfig
from ktrainer.errors import ConfigError


def check_healing(config: Config) -> None:
    """Refuse a configuration that `world.heal` cannot continue after a rank fails.

    Raises:
        ConfigError: for the first key found, with what to do.
    """
    world = config.world
    if not world.heal:
        _check_no_growth(world)
        return
    if world.max_size is not None and world.max_size < world.min_size:
        raise ConfigError(
            f"is less than world.min_size={world.min_size}.",
            path="world.max_size",
            value=world.max_size,
        )
    if config.data.service.config is not None:
        raise ConfigError(
            "contradicts data.service.config: the service deals its batches to a fixed number of "
            "ranks. Set world.heal=false, and restart after failures with --max-restarts.",
            path="world.heal",
            value=True,
        )
    _check_no_rollback(config)
    _check_backend(config)
    if isinstance(config.backend, PipelineConfig):
        _check_pipeline(config)
    elif config.data.batch != "global" or config.data.shard != "batch":
        key = "batch" if config.data.batch != "global" else "shard"
        raise ConfigError(
            "world.heal=true needs data that can be split over another number of ranks: set "
            "data.batch=global and data.shard=batch, or restart instead (`ktrainer run "
            "--max-restarts`).",
            path=f"data.{key}",
            value=getattr(config.data, key),
        )


def _check_no_growth(world: WorldConfig) -> None:
    for key in ("replace", "max_size"):
        if getattr(world, key):
            raise ConfigError(
                "needs world.heal=true, which lets processes join and leave a run. Set it, or "
                "leave this key out.",
                path=f"world.{key}",
                value=getattr(world, key),
            )


def _check_no_rollback(config: Config) -> None:
    for key in ("nan", "on_spike"):
        if getattr(config.health, key) == "rollback":
            raise ConfigError(
                "world.heal=true needs a number of updates that never decreases: choose stop or "
                "skip.",
                path=f"health.{key}",
                value="rollback",
            )


def _check_backend(config: Config) -> None:
    """Refuse a backend that neither continues without lost ranks nor saves their state."""
    backend = config.backend
    remedy = "set world.heal=false, and let `ktrainer run --max-restarts` restart the run."
    if not isinstance(backend, (DataParallelConfig, PipelineConfig)):
        raise ConfigError(
            "only backend=data_parallel continues without failed ranks, and only backend=pipeline "
            f"with replicas saves their state: {remedy}",
            path="world.heal",
            value=True,
            needs=["backend.name"],
        )
    if backend.engine == "horovod":
        raise ConfigError(
            f"Horovod cannot continue without failed ranks: set backend.engine=mpi, or {remedy}",
            path="backend.engine",
            value="horovod",
        )
    _check_gradients(backend)


def _check_gradients(backend: DataParallelConfig | PipelineConfig) -> None:
    """Refuse gradients of which each rank has a part, or which depend on the number of ranks."""
    if getattr(backend, "local_layers", None):
        raise ConfigError(
            "a lost rank takes its own layers with it, and one that joins has none to begin with: "
            "set world.heal=false, and let `ktrainer run --max-restarts` restart the run from "
            "checkpoints, which have the layers of every rank.",
            path="backend.local_layers",
            value=backend.local_layers,  # type: ignore[union-attr]
        )
    if backend.compression == "powersgd":
        raise ConfigError(
            "a lost rank takes with it what PowerSGD has yet to send of its gradients: set "
            "world.heal=false, and let `ktrainer run --max-restarts` restart the run from "
            "checkpoints, which have that of every rank.",
            path="backend.compression",
            value="powersgd",
        )
    if getattr(backend, "op", "average") == "sum":
        raise ConfigError(
            "the sum over ranks changes with their number, so that world.heal=true would change "
            "the results: set backend.op=average.",
            path="backend.op",
            value="sum",
        )


def _check_pipeline(config: Config) -> None:
    """A pipeline exits when a rank fails, after the replicas have saved its state."""
    world = config.world
    given = {"replace": world.replace, "max_size": world.max_size, "min_size": world.min_size > 1}
    for key, value in given.items():
        if value:
            raise ConfigError(
                "the ranks of a pipeline hold different stages, so all exit when one fails, once "
                "its state is saved: remove this key, and let `ktrainer run --heal --max-restarts` "
                "restart all of them.",
                path=f"world.{key}",
                value=getattr(world, key),
            )


def check_health(config: Config) -> None:
    """Refuse actions of `health` that the other keys rule out.

    Raises:
        ConfigError: for the first one found.
    """
    health = config.health
    if health.spike is None and health.on_spike != "stop":
        raise ConfigError(
            f"{health.on_spike!r} has no effect without health.spike, the factor over the median "
            "loss that counts as a spike: set it, to 3 for example.",
            path="health.on_spike",
            value=health.on_spike,
            needs=["health.spike"],
        )
    for key in ("nan", "on_spike"):
        action, path = getattr(health, key), f"health.{key}"
        saves = config.checkpoint.every is not None or config.checkpoint.best is not None
        if action == "rollback" and not saves:
            raise ConfigError(
                "'rollback' restores the last checkpoint: set checkpoint.every too, such as "
                "checkpoint.every=500ba.",
                path=path,
                value=action,
                needs=["checkpoint.every", "checkpoint.best"],
            )
        if isinstance(config.backend, TfDistributeConfig):
            _check_loss_actions(config, config.backend, action, path)


def _check_loss_actions(
    config: Config, backend: TfDistributeConfig, action: str, path: str
) -> None:
    watches = action in ("skip", "rollback") or config.health.spike is not None
    if backend.strategy == "parameter_server" and watches:
        raise ConfigError(
            "workers of parameter_server apply updates on their own, so none can be skipped or "
            "rolled back on all of them at once. Set health.nan=stop and health.spike=null.",
            path=path,
            value=action,
        )
    parts = config.trainer.accumulate > 1 or config.trainer.xla
    if action == "skip" and parts and backend.strategy != "default":
        raise ConfigError(
            f"strategy={backend.strategy} updates metrics before an accumulated update, or one "
            "compiled with XLA, is applied, and cannot undo them. Set trainer.accumulate=1 and "
            f"trainer.xla=false, or {path}=stop or rollback.",
            path=path,
            value=action,
        )
