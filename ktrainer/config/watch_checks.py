"""Contradictions between `watch` or the trackers of `logging` and the other keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from ktrainer.config.backend_keys import DataParallelConfig, TfDistributeConfig
from ktrainer.config.redact import is_secret_name
from ktrainer.config.schema import Config
from ktrainer.errors import ConfigError

TRACKERS = ("wandb", "mlflow", "trackio")
_MLFLOW = ("experiment", "tracking_uri", "run_name", "tags")
_OURS = ("id", "resume", "config", "reinit")  # of a tracker's `init`: one run through restarts


def check_watch(config: Config) -> None:
    """Refuse values that cannot be had as configured.

    Raises:
        ConfigError: for the first key found.
    """
    watch, logging, none = config.watch, config.logging, list[str]()
    found: list[tuple[str, object, str | None, list[str]]] = []
    if watch.norms is not None:
        found.append(("watch.norms", watch.norms, _not_measured(config), none))
    if logging.histograms is not None:
        found.append(("logging.histograms", logging.histograms, _no_histograms(config), none))
    if watch.layers and watch.norms is None:
        other = "has no effect without watch.norms: set that too."
        found.append(("watch.layers", True, other, ["watch.norms"]))
    if watch.communication and not isinstance(config.backend, DataParallelConfig):
        other = "counts the gradients of backend=data_parallel: choose that, or set it to false."
        found.append(("watch.communication", True, other, ["backend.name"]))
    if logging.histograms is not None and not logging.tensorboard:
        other = "has no effect without logging.tensorboard=true."
        found.append(("logging.histograms", logging.histograms, other, ["logging.tensorboard"]))
    for path, value, why, needs in found:
        if why is not None:
            raise ConfigError(why, path=path, value=value, needs=needs)


def _no_histograms(config: Config) -> str | None:
    """Why there can be no histograms; None: there can."""
    if config.trainer.xla:
        return "XLA cannot compile them. Set it to null, or trainer.xla=false."
    return _not_measured(config)


def _not_measured(config: Config) -> str | None:
    """Why gradients and updates cannot be measured; None: they can."""
    backend = config.backend
    if isinstance(backend, TfDistributeConfig) and backend.strategy == "parameter_server":
        return (
            "gradients stay on the workers of parameter_server, whose updates have no common "
            "step. Set it to null, or choose another strategy."
        )
    if config.trainer.asks_for_several_steps:
        return (
            "needs an update of its own call, but trainer.steps_per_call="
            f"{config.trainer.steps_per_call}. Set that to auto or 1."
        )
    return None


def check_tracker_arguments(config: Config) -> None:
    """Refuse arguments that a tracker cannot have.

    Raises:
        ConfigError: for the first one found.
    """
    for tracker in TRACKERS:
        for name in getattr(config.logging, tracker) or {}:
            path = f"logging.{tracker}.{name}"
            if (secret := _secret_in(name, getattr(config.logging, tracker)[name])) is not None:
                path = f"logging.{tracker}.{secret}"
                raise ConfigError(
                    "a configuration is kept in files and shown in logs, so it may have no "
                    f"credentials. Leave it out, and log in as {tracker} says: with its own "
                    "command, or its environment variables.",
                    path=path,
                )
            if name in _OURS:
                raise ConfigError(
                    "ktrainer sets it, to continue the same run after a restart. Leave it out.",
                    path=path,
                )
            if tracker == "mlflow" and name not in _MLFLOW:
                known = f"unknown argument; there are {', '.join(_MLFLOW)}."
                raise ConfigError(known, path=path, value=name, known=_MLFLOW)


def _secret_in(name: object, value: object) -> str | None:
    """The dotted name of the first credential in an argument; None: there is none."""
    if is_secret_name(str(name)):
        return str(name)
    if not isinstance(value, Mapping):
        return None
    inner = (_secret_in(key, inner) for key, inner in value.items())
    return next((f"{name}.{found}" for found in inner if found is not None), None)


def require_trackers(config: Config) -> None:
    """Refuse trackers whose library is not installed here; imports none.

    Raises:
        ConfigError: for the first one found.
    """
    for tracker in TRACKERS:
        wanted = getattr(config.logging, tracker) is not None
        if wanted and not config.trainer.fast_dev_run and find_spec(tracker) is None:
            raise ConfigError(
                f"needs the package {tracker}, which is not installed: in the checkout of "
                f'ktrainer, pip install ".[{tracker}]", or set logging.{tracker}=null.',
                path=f"logging.{tracker}",
            )
