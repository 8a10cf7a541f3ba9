"""Parameters of the script's own: the group `user` of a configuration.

A script names them with their defaults, which a file and the command line may change:

    trainer = Trainer.from_cli(defaults={"user": {"width": 64, "optimizer": {"lr": 1e-3}}})
    rate = trainer.config.user.optimizer.lr

    python train.py user.optimizer.lr=1e-2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktrainer.config.key_errors import show
from ktrainer.errors import ConfigError, nearest


class Parameters(dict[str, Any]):
    """A group of parameters: `parameters.width` is `parameters["width"]`. Not to be changed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none"
            raise AttributeError(f"there is no parameter {name!r}; there are: {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a configuration does not change: give user.{name} before the Trainer is made"
        )


def as_parameters(values: Mapping[str, Any], path: str = "user") -> Parameters:
    """`values`, groups inside of them too, with access by attribute.

    Raises:
        ConfigError: a name that is a method of dict, which access by attribute would give.
    """
    found = Parameters()
    for name, value in values.items():
        inner = f"{path}.{name}"
        if hasattr(dict, name):
            raise ConfigError(f"every dict has a method {name!r}: choose another name", path=inner)
        found[name] = as_parameters(value, inner) if isinstance(value, Mapping) else value
    return found


def checked_parameters(
    values: Mapping[str, Any], declared: Mapping[str, Any], path: str = "user"
) -> dict[str, Any]:
    """`values`, whole numbers made real where the default is.

    Args:
        values: defaults, with what a file and the command line have set.
        declared: the defaults alone. null takes any value, and an empty group any keys.

    Raises:
        ConfigError: a key that has no default, or a value of another type than its default.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{path}.{name}"
        if name not in declared:
            raise _unknown(name, declared, inner)
        found[name] = _checked(value, declared[name], inner)
    return found


def _checked(value: Any, default: Any, path: str) -> Any:
    if default is None or (isinstance(default, str) and "${" in default):
        return value
    if isinstance(default, Mapping) and isinstance(value, Mapping):
        return checked_parameters(value, default, path) if default else value
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        kind = "a group" if isinstance(default, Mapping) else type(default).__name__
        raise ConfigError(
            f"expected {kind}, as its default {show(path, default)} is, got {show(path, value)}. A "
            "default of null in the script takes any value.",
            path=path,
        )
    return value


def _unknown(name: str, declared: Mapping[str, Any], path: str) -> ConfigError:
    if declared:
        near = nearest(name, declared)
        hint = f"Did you mean {near!r}?" if near else f"It has {', '.join(declared)}."
        message = f"the script has no parameter of this name. {hint}"
    else:
        message = (
            "the script has no parameters of its own here. It names them with their defaults: "
            'Trainer.from_cli(defaults={"user": {"lr": 0.001}}).'
        )
    return ConfigError(message, path=path)
