"""Refusing what the schema does not know, and saying it in the user's terms.

OmegaConf's own errors are turned into `ConfigError` here; none of them reaches the user.
"""

from __future__ import annotations

from typing import Any

from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationValidationError,
    MissingMandatoryValue,
)

from ktrainer.config.backends import BACKENDS, VALUE_ALIASES, BackendConfig
from ktrainer.config.redact import REDACTED, is_secret_name, redact_text
from ktrainer.config.schema import Config
from ktrainer.config.schematree import (
    choices,
    expected,
    group_of,
    hints,
    item_group,
    likest,
    lookup,
    suggest,
)
from ktrainer.errors import ConfigError


def check_keys(tree: dict[str, Any], backend: str) -> None:
    """Refuse keys that the schema does not have, and values where a group belongs.

    Args:
        tree: nested dict in the schema's shape, `backend` as a dict of keys.
        backend: name of the chosen backend, whose keys are known.

    Raises:
        ConfigError: naming the first such key and what is meant.
    """
    _check_group(tree, Config, "", backend)


def _check_group(tree: dict[str, Any], group: type, prefix: str, backend: str) -> None:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        hint = hints(group).get(key)
        if hint is None:
            raise _unknown(path, key, value, backend)
        inner = BACKENDS[backend] if hint is BackendConfig else group_of(hint)
        if inner is not None:
            if not isinstance(value, dict):
                names = ", ".join(hints(inner))
                message = f"is a group with the keys {names}; {show(path, value)} is no group."
                raise ConfigError(message, path=path, value=value)
            _check_group(value, inner, f"{path}.", backend)
        elif hint is bool and not isinstance(value, (bool, str)):
            # OmegaConf would take any number for a bool.
            message = f"expected true or false, got {show(path, value)}."
            raise ConfigError(message, path=path, value=value)
        elif (item := item_group(hint)) and isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, dict):
                    _check_group(entry, item, f"{path}[{i}].", backend)


def _unknown(path: str, name: str, value: Any, backend: str) -> ConfigError:
    """The error for a key called `name` that is not in the schema."""
    shown, group = show(path, value), path.removesuffix(name).rstrip(".")
    if group == "backend":
        owners = [b for b, c in BACKENDS.items() if name in hints(c)]
        if owners:
            message = f"is a key of backend={owners[0]}, but the backend is {backend}; "
            message += f"got {shown}. Add backend={owners[0]}, or leave the key out."
            return ConfigError(message, path=path, value=_safe(path, value))
    if value is None and ":" in name:
        key, _, rest = name.partition(":")
        message = f"YAML wants a space after the colon: write {{{key}: {rest or '...'}}}."
        return ConfigError(message, path=path)
    if "." in name:
        message = "keys with dots are for the command line: in a dict or file, nest the groups."
        return ConfigError(message, path=path, value=_safe(path, value))
    message = f"unknown key (value {shown})."
    if "[" in path:
        found = lookup(group.split("[")[0])
        inner = item_group(found[1]) if found else None
        near = likest(name, hints(inner)) if inner else None
        if inner and not near:
            message += f" An item has the keys {', '.join(hints(inner))}."
    else:
        near = suggest(path, backend)
    if near:
        message += f" Did you mean {near!r}?"
    elif group == "backend" and (other := _of_another_backend(path)):
        message += f" Did you mean {other}?"
    elif group and "[" not in path:
        parent = lookup(group, backend)
        inner = BACKENDS[backend] if group == "backend" else group_of(parent[1]) if parent else None
        message += f" {group} has the keys {', '.join(hints(inner))}." if inner else ""
    elif not group:
        message += f" The top level has {', '.join(hints(Config))}."
    return ConfigError(message, path=path, value=_safe(path, value))


def _of_another_backend(path: str) -> str | None:
    """The key of any backend that is most likely meant, and whose it is."""
    found = ((near, name) for name in BACKENDS if (near := suggest(path, name)))
    return next((f"{near!r} of backend={name}" for near, name in found), None)


def show(path: str, value: Any) -> str:
    """A value as it may be shown: short, and not when it is a secret."""
    text = repr(_safe(path, value))
    return text if len(text) <= 200 else text[:197] + "..."


def _safe(path: str, value: Any) -> Any:
    if any(is_secret_name(part) for part in path.split(".")):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def translate(
    error: Exception, raw: dict[str, Any], backend: str, path: str | None = None
) -> ConfigError:
    """The `ConfigError` for an error of OmegaConf's.

    Args:
        error: what OmegaConf raised.
        raw: the merged layers, unresolved: an interpolation is shown as it was written, never
            with the value that it stands for, which may be secret.
        backend: name of the chosen backend.
        path: the key, where OmegaConf does not know it.
    """
    path = path or str(getattr(error, "full_key", None) or "") or None
    value = _at(raw, path or "")
    shown = show(path or "", value)
    if isinstance(error, RecursionError):
        return ConfigError("the configuration is nested too deeply, or refers to itself.")
    if isinstance(error, MissingMandatoryValue):
        message = f"a required value is not set: give {path}=..."
        return ConfigError(message, path=path, value="???")
    unresolved = isinstance(error, (GrammarParseError, InterpolationResolutionError))
    if unresolved and not isinstance(error, InterpolationValidationError):
        problem = _interpolation_problem(error)
        return ConfigError(f"cannot resolve {shown}: {problem}", path=path, value=_safe("", value))
    found = lookup(path, backend) if path else None
    if found is None:
        text = redact_text(str(error).splitlines()[0])
        return ConfigError(f"got {shown}: {text}", path=path, value=value)
    known = choices(found[1])
    message = f"expected {expected(*found)}, got {shown}."
    if isinstance(value, str) and "oc.env" in value:
        message += " A number from the environment may need ${oc.decode:${oc.env:NAME}}."
    elsewhere = VALUE_ALIASES.get(path or "", {})
    if isinstance(value, str) and value in elsewhere:
        message += f" What others call {value!r} is {path}={elsewhere[value]} here."
    return ConfigError(message, path=path, value=_safe(path or "", value), known=known)


def _interpolation_problem(error: Exception) -> str:
    """What is wrong with an interpolation, without any value in it."""
    text = str(error).splitlines()[0]
    if "Environment variable" in text:
        name = text.split("'")[1] if "'" in text else "?"
        return (
            f"the environment variable {name} is not set. Set it, or give a default: "
            f"${{oc.env:{name},DEFAULT}}."
        )
    if "Recursive" in text:
        return "it refers to itself."
    if isinstance(error, GrammarParseError):
        return "its ${...} is not complete."
    return redact_text(text)


def _at(raw: Any, path: str) -> Any:
    """The value at a dotted path of the unresolved layers, or None."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(raw, dict):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return None
    return raw
