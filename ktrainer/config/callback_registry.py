"""Callbacks by name, for the configuration.

A name is one of ours, one of Keras' own callbacks, one that a script registers with
`@register("name")`, or an entry point of the group `ktrainer.callbacks`. An import path such as
`my_package.callbacks.Confetti` is accepted only if the `allow` list covers it, because importing
runs code: nothing else is imported, not even to inspect it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from ktrainer.errors import ConfigError, nearest


class UnknownCallback(ConfigError):
    """No callback is registered under this plain name."""


ENTRY_POINTS = "ktrainer.callbacks"

_BUILT_IN = {
    "audit": "ktrainer.callbacks.weight_audit:Audit",
    "average_metrics": "ktrainer.callbacks.metric_averaging:AverageMetrics",
    "broadcast_variables": "ktrainer.callbacks.broadcast:BroadcastVariables",
    "checkpoint": "ktrainer.checkpoint.checkpoint_callback:Checkpoint",
    "csv_log": "ktrainer.callbacks.csv_log:CSVLog",
    "learning_rate": "ktrainer.callbacks.learning_rate:LearningRate",
    "loss_guard": "ktrainer.callbacks.loss_guard:LossGuard",
    "plain_progress": "ktrainer.callbacks.console:PlainProgress",
    "rich_progress": "ktrainer.callbacks.console:RichProgress",
    "tensorboard_log": "ktrainer.callbacks.tensorboard:TensorBoardLog",
    "throughput": "ktrainer.callbacks.throughput:Throughput",
    "backup_and_restore": "keras.callbacks:BackupAndRestore",
    "csv_logger": "keras.callbacks:CSVLogger",
    "early_stopping": "keras.callbacks:EarlyStopping",
    "model_checkpoint": "keras.callbacks:ModelCheckpoint",
    "reduce_lr_on_plateau": "keras.callbacks:ReduceLROnPlateau",
    "remote_monitor": "keras.callbacks:RemoteMonitor",
    "swap_ema_weights": "keras.callbacks:SwapEMAWeights",
    "tensorboard": "keras.callbacks:TensorBoard",
    "terminate_on_nan": "keras.callbacks:TerminateOnNaN",
}

_registered: dict[str, Callable[..., Any]] = {}  # by plain name
_spelling: dict[str, str] = {}  # plain name -> as it was registered

Made = TypeVar("Made", bound=Callable[..., Any])


def register(name: str) -> Callable[[Made], Made]:
    """Make a callback class, or a function that returns a callback, known as `name`.

    Args:
        name: its name in `callbacks: {...: {type: NAME}}`; no dots or colons.

    Raises:
        ConfigError: if another callback has that name.
    """
    if not name or "." in name or ":" in name:
        raise ConfigError(
            f"{name!r} cannot name a callback: names have no dots or colons.", value=name
        )

    def keep(made: Made) -> Made:
        taken = _registered.get(_plain(name))
        again = taken is not None and _home(taken) == _home(made)
        if _plain(name) in _builtin() or (taken is not None and taken is not made and not again):
            message = f"a callback named {name!r} is registered already: choose another name."
            raise ConfigError(message, value=name)
        _registered[_plain(name)], _spelling[_plain(name)] = made, name
        return made

    return keep


def names() -> list[str]:
    """All names that a callback's `type` may have, sorted."""
    own = (_spelling[plain] for plain in _registered)
    return sorted({*_BUILT_IN, *own, *_entry_points()})


def check(spec: Any, *, allow: Iterable[str] = (), path: str = "callbacks") -> None:
    """Refuse what `build` would refuse, without importing anything.

    Args:
        spec: `{type: NAME, argument: value, ...}`, or a name alone.
        allow: prefixes of import paths that may be imported.
        path: the configuration key, for the error message.

    Raises:
        ConfigError: for an unknown name, or an import path that is not allowed.
    """
    _resolve(*_split(spec, path), tuple(allow), path)


def is_type(spec: Any, name: str) -> bool:
    """Whether a specification names the callback `name`, however it is spelled or imported."""
    kind, _ = _split(spec, "callbacks")
    return _plain(kind.replace(":", ".").rpartition(".")[2]) == _plain(name)


def build(spec: Any, *, allow: Iterable[str] = (), path: str = "callbacks") -> Any:
    """The callback that a specification names, made with its arguments.

    Args:
        spec, allow, path: as in `check`.

    Raises:
        ConfigError: for what `check` refuses, for something that is no callback, and for
            arguments that the callback does not take.
    """
    kind, arguments = _split(spec, path)
    target = _resolve(kind, arguments, tuple(allow), path)
    maker = target if callable(target) else _import(target, kind, tuple(allow), path)
    try:
        made = maker(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(arguments) or "no arguments"
        raise ConfigError(f"{kind!r} cannot be made with {given}: {error}", path=path) from error
    if not callable(getattr(made, "on_train_begin", None)):
        raise ConfigError(f"{kind!r} makes no callback but {type(made).__name__}.", path=path)
    return made


def _split(spec: Any, path: str) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("type"), str):
        message = "a callback is given as {type: NAME, argument: value, ...}"
        shown = spec if isinstance(spec, (bool, int, float)) else type(spec).__name__
        colon = isinstance(spec, Mapping) and next((k for k in spec if ":" in str(k)), None)
        hint = f" YAML wants a space after the colon of {colon!r}." if colon else ""
        raise ConfigError(f"{message}, not {shown}.{hint}", path=path, value=shown)
    return spec["type"], {str(k): v for k, v in spec.items() if k != "type"}


def _resolve(
    kind: str, arguments: Mapping[str, Any], allow: tuple[str, ...], path: str
) -> Callable[..., Any] | str | EntryPoint:
    """The maker that `kind` names, or where to import it from. Imports nothing."""
    if "_target_" in arguments:
        message = "_target_ is not read here: name a registered callback with 'type'."
        raise ConfigError(message, path=f"{path}._target_")
    if "." in kind or ":" in kind:
        return _allowed(kind, allow, path)
    plain = _plain(kind)
    if plain in _registered:
        return _registered[plain]
    if plain in _builtin():
        return _builtin()[plain]
    found = {_plain(name): point for name, point in _entry_points().items()}
    if plain in found:
        return found[plain]
    near = nearest(kind, names()) or nearest(plain, names())
    hint = f" Did you mean {near!r}?" if near else f" There are {', '.join(names())}."
    message = f"there is no callback named {kind!r}.{hint} Your own callback must be registered "
    message += "with @ktrainer.register(NAME) before the configuration is loaded."
    raise UnknownCallback(message, path=f"{path}.type", value=kind)


def _allowed(kind: str, allow: tuple[str, ...], path: str) -> str:
    """The import path `module:Class`, if `allow` covers it."""
    module, _, name = kind.partition(":") if ":" in kind else kind.rpartition(".")
    parts = [*module.split("."), name]
    if not all(part.isidentifier() for part in parts) or any(p.startswith("_") for p in parts):
        message = f"unknown name {kind!r}: an import path is package.module.Class."
        raise ConfigError(message, path=f"{path}.type", value=kind)
    dotted = f"{module}.{name}"
    if parts[0] in sys.stdlib_module_names or not any(_covers(prefix, dotted) for prefix in allow):
        raise ConfigError(
            f"unknown name {kind!r}, and nothing was imported: register it with "
            f"@ktrainer.register(NAME), or add its package to the list 'allow'.",
            path=f"{path}.type",
            value=kind,
            known=names(),
        )
    return f"{module}:{name}"


def _covers(prefix: str, dotted: str) -> bool:
    prefix = prefix.replace(":", ".").rstrip(".")
    return bool(prefix) and (dotted == prefix or dotted.startswith(prefix + "."))


def _import(
    target: str | EntryPoint, kind: str, allow: tuple[str, ...], path: str
) -> Callable[..., Any]:
    try:
        if isinstance(target, EntryPoint):
            return target.load()
        module, _, name = target.partition(":")
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"{kind!r} cannot be imported: {error}"
        raise ConfigError(message, path=f"{path}.type", value=kind) from error
    # An allowed module may have imported something that is not allowed, such as its own `os`.
    home = getattr(found, "__module__", "") or ""
    if ("." in kind or ":" in kind) and not (
        isinstance(found, type)
        and callable(getattr(found, "on_train_begin", None))
        and any(_covers(prefix, f"{home}.{found.__qualname__}") for prefix in allow)
    ):
        message = f"{kind!r} is not a callback class of an allowed package; it was not called."
        raise ConfigError(message, path=f"{path}.type", value=kind)
    return found


def _plain(name: str) -> str:
    """The spelling that makes `EarlyStopping`, `early_stopping` and `early-stopping` one name."""
    return name.lower().replace("_", "").replace("-", "")


def _builtin() -> dict[str, str]:
    return {_plain(name): target for name, target in _BUILT_IN.items()}


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _home(made: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a definition: a notebook cell that is run again repeats it."""
    return getattr(made, "__module__", ""), getattr(made, "__qualname__", repr(made))
