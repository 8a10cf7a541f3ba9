"""Where two configurations differ: between ranks, and from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktrainer.config.backends import BACKENDS
from ktrainer.config.redact import redact
from ktrainer.config.schema import Config

_ABSENT = "(not set)"


def differences(
    one: Config | Mapping[str, Any], other: Config | Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Dotted paths at which two configurations differ, with both values, secrets redacted.

    Args:
        one, other: configurations, or what their `to_dict` gave.

    Returns:
        {path: (value in `one`, value in `other`)}; empty when they are equal. Secrets that
        differ are listed, both shown as `***`.
    """
    secrets = (*getattr(one, "_secrets", ()), *getattr(other, "_secrets", ()))
    a, b = _flat(_plain(one)), _flat(_plain(other))
    shown_a, shown_b = _flat(redact(_plain(one), secrets)), _flat(redact(_plain(other), secrets))
    return {
        path: (shown_a.get(path, _ABSENT), shown_b.get(path, _ABSENT))
        for path in [*a, *(p for p in b if p not in a)]
        if not _same(a.get(path, _ABSENT), b.get(path, _ABSENT))
    }


def config_diff(config: Config) -> dict[str, Any]:
    """What differs from the defaults, nested as in a YAML file; `load_config` of it gives the
    configuration again. Not redacted."""
    defaults = Config(backend=BACKENDS[config.backend.name]()).to_dict()
    changed = _changed(config.to_dict(), defaults)
    if config.backend.name != Config().backend.name:
        changed["backend"] = {"name": config.backend.name, **changed.get("backend", {})}
    return changed


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key, _ABSENT)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _changed(value, default):
                found[key] = inner
        elif not _same(value, default):
            found[key] = value
    return found


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _plain(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, Config) else dict(config)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted path: leaf} of nested dicts and lists; empty ones are leaves."""
    if isinstance(tree, Mapping) and tree:
        items = [(f"{prefix}.{k}" if prefix else str(k), v) for k, v in tree.items()]
    elif isinstance(tree, (list, tuple)) and tree:
        items = [(f"{prefix}[{i}]", v) for i, v in enumerate(tree)]
    else:
        return {prefix: tree}
    return {path: leaf for key, value in items for path, leaf in _flat(value, key).items()}
