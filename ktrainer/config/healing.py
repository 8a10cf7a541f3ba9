"""What `world.heal` needs of the rest of the configuration."""

from __future__ import annotations

from ktrainer.config.backends import DataParallelConfig, PipelineConfig
from ktrainer.config.schema import Config
from ktrainer.errors import ConfigError


def check_healing(config: Config) -> None:
    """Refuse what could not go on after the death of a rank.

    Raises:
        ConfigError: naming the key, and what to do.
    """
    world = config.world
    if not world.heal:
        for key in ("replace", "max_size"):
            if getattr(world, key):
                raise ConfigError(
                    "needs world.heal=true: newcomers join as others leave.",
                    path=f"world.{key}",
                    value=getattr(world, key),
                )
        return
    if world.max_size is not None and world.max_size < world.min_size:
        raise ConfigError(
            f"is less than world.min_size={world.min_size}.",
            path="world.max_size",
            value=world.max_size,
        )
    _check_backend(config)
    if isinstance(config.backend, PipelineConfig):
        _check_pipeline(config)
    elif config.data.batch != "global" or config.data.shard != "batch":
        key = "batch" if config.data.batch != "global" else "shard"
        raise ConfigError(
            "world.heal=true needs data that every rank could cut anew: set data.batch=global and "
            "data.shard=batch, or heal by restarts (`ktrainer run --max-restarts`).",
            path=f"data.{key}",
            value=getattr(config.data, key),
        )

    for key in ("nan", "on_spike"):
        if getattr(config.health, key) == "rollback":
            raise ConfigError(
                "world.heal=true goes by the number of updates, which must not fall: choose stop "
                "or skip.",
                path=f"health.{key}",
                value="rollback",
            )


def _check_backend(config: Config) -> None:
    backend = config.backend
    remedy = "set world.heal=false, and let `ktrainer run --max-restarts` start it again."
    if not isinstance(backend, (DataParallelConfig, PipelineConfig)):
        raise ConfigError(
            "only backend=data_parallel goes on without ranks that die, and only backend=pipeline "
            f"with replicas saves what is left: {remedy}",
            path="world.heal",
            value=True,
        )
    if backend.engine == "horovod":
        raise ConfigError(
            f"Horovod cannot go on without ranks that die: set backend.engine=mpi, or {remedy}",
            path="backend.engine",
            value="horovod",
        )
    if getattr(backend, "op", "average") == "sum":
        raise ConfigError(
            "the sum over ranks changes with their number, so that world.heal=true would change "
            "the results: set backend.op=average.",
            path="backend.op",
            value="sum",
        )


def _check_pipeline(config: Config) -> None:
    """A pipeline ends with the first death, whose state the replicas save."""
    world = config.world
    given = {"replace": world.replace, "max_size": world.max_size, "min_size": world.min_size > 1}
    for key, value in given.items():
        if value:
            raise ConfigError(
                "the ranks of a pipeline cannot do each other's work, so all end with the first "
                "that dies, once its state is saved: leave it out, and let `ktrainer run --heal "
                "--max-restarts` start all of them again.",
                path=f"world.{key}",
                value=getattr(world, key),
            )
