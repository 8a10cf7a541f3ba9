"""Contradictions in what is to be done about a loss that goes wrong; nothing is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktrainer.config.backends import TfDistributeConfig
from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.config.schema import Config


def check_health(config: Config) -> None:
    """Refuse what cannot be done with the other keys.

    Raises:
        ConfigError: for the first one found.
    """
    health = config.health
    if health.spike is None and health.on_spike != "stop":
        raise ConfigError(
            f"{health.on_spike!r} means nothing without health.spike, the factor over the usual "
            "loss that is a spike: set it, to 3 for example.",
            path="health.on_spike",
            value=health.on_spike,
        )
    for key in ("nan", "on_spike"):
        action, path = getattr(health, key), f"health.{key}"
        saves = config.checkpoint.every is not None or config.checkpoint.best is not None
        if action == "rollback" and not saves:
            raise ConfigError(
                "'rollback' goes back to the last checkpoint: set checkpoint.every too, such as "
                "checkpoint.every=500ba.",
                path=path,
                value=action,
            )
        if isinstance(config.backend, TfDistributeConfig):
            _check_strategy(config, config.backend, action, path)


def _check_strategy(config: Config, backend: TfDistributeConfig, action: str, path: str) -> None:
    watches = action in ("skip", "rollback") or config.health.spike is not None
    if backend.strategy == "parameter_server" and watches:
        raise ConfigError(
            "workers of parameter_server apply updates each by itself, so no update is everybody's "
            "to leave out, or to go back before. Set health.nan=stop and health.spike=null.",
            path=path,
            value=action,
        )
    parts = config.trainer.accumulate > 1 or config.trainer.xla
    if action == "skip" and parts and backend.strategy != "default":
        raise ConfigError(
            f"strategy={backend.strategy} counts metrics before an update of several parts, or one "
            "compiled with XLA, is applied, and cannot take them back. Set trainer.accumulate=1 "
            f"and trainer.xla=false, or {path}=stop or rollback.",
            path=path,
            value=action,
        )
