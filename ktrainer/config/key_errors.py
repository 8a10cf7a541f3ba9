"""Errors for unknown keys and wrong values, with the nearest key and what to do.

OmegaConf's own errors are translated to `ConfigError`; none of them reaches the user, as they lack
the path of groups and list items, the likely key of another group, and would show secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import Field, is_dataclass
from difflib import SequenceMatcher
from typing import Any, get_origin

from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationValidationError,
    MissingMandatoryValue,
)

from ktrainer.config.backend_keys import BACKENDS, VALUE_ALIASES, BackendConfig
from ktrainer.config.redact import REDACTED, is_secret_name, redact_text
from ktrainer.config.schema import Config
from ktrainer.config.schema_fields import (
    alternatives,
    choices,
    expected,
    group_of,
    hints,
    item_group,
    schema_fields,
)
from ktrainer.errors import ConfigError


def check_keys(tree: dict[str, Any], backend: str) -> None:
    """Refuse keys that the schema does not have, and values where a group belongs.

    Args:
        tree: nested dict in the schema's shape, `backend` as a dict of keys.
        backend: name of the chosen backend, whose keys are known.

    Raises:
        ConfigError: for the first such key, with the nearest one.
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
        elif isinstance(value, list) and any(get_origin(t) is dict for t in alternatives(hint)):
            # OmegaConf's error for it names no key.
            words = expected(schema_fields(group)[key], hint)
            raise ConfigError(f"expected {words}, got {show(path, value)}.", path=path, value=value)
        elif (item := item_group(hint)) and isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, dict):
                    _check_group(entry, item, f"{path}[{i}].", backend)


def _unknown(path: str, name: str, value: Any, backend: str) -> ConfigError:
    """The error for a key `name` that is not in the schema."""
    shown, group = show(path, value), path.removesuffix(name).rstrip(".")
    if group == "backend":
        owners = [b for b, c in BACKENDS.items() if name in hints(c)]
        if owners:
            message = f"is a key of backend={owners[0]}, but the backend is {backend}; "
            message += f"got {shown}. Add backend={owners[0]}, or remove the key."
            return ConfigError(message, path=path, value=_safe(path, value))
    if value is None and ":" in name:
        key, _, rest = name.partition(":")
        message = f"YAML wants a space after the colon: write {{{key}: {rest or '...'}}}."
        return ConfigError(message, path=path)
    if "." in name:
        message = "keys with dots are for the command line: in a dict or file, nest the groups."
        return ConfigError(message, path=path, value=_safe(path, value))
    message = f"unknown key (value {shown}).{_hint(path, group, name, backend)}"
    return ConfigError(message, path=path, value=_safe(path, value))


def _hint(path: str, group: str, name: str, backend: str) -> str:
    """The key that an unknown one is probably meant to be, or else those that there are."""
    if "[" in path:
        found = lookup(group.split("[")[0])
        inner = item_group(found[1]) if found else None
        if inner and (near := closest_key(name, hints(inner))):
            return f" Did you mean {near!r}?"
        return f" An item has the keys {', '.join(hints(inner))}." if inner else ""
    if near := suggest_key(path, backend):
        return f" Did you mean {near!r}?"
    if group == "backend" and (other := _of_another_backend(path)):
        return f" Did you mean {other}?"
    if not group:
        return f" The top level has {', '.join(hints(Config))}."
    parent = lookup(group, backend)
    inner = BACKENDS[backend] if group == "backend" else group_of(parent[1]) if parent else None
    return f" {group} has the keys {', '.join(hints(inner))}." if inner else ""


def _of_another_backend(path: str) -> str | None:
    """The nearest key of any backend, with that backend."""
    found = ((near, name) for name in BACKENDS if (near := suggest_key(path, name)))
    return next((f"{near!r} of backend={name}" for near, name in found), None)


def show(path: str, value: Any) -> str:
    """A value as text: shortened, and redacted if it is a secret."""
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
    aliases = VALUE_ALIASES.get(path or "", {})
    if isinstance(value, str) and value in aliases:
        message += f" {value!r} is {path}={aliases[value]} here."
    return ConfigError(message, path=path, value=_safe(path or "", value), known=known)


def _interpolation_problem(error: Exception) -> str:
    """The problem with an interpolation, without any value in it."""
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


def lookup(path: str, backend: str | None = None) -> tuple[Field[Any], Any] | None:
    """The field and type at a dotted path, or None; list items are written `a.b[0].c`."""
    group: type = Config
    found: tuple[Field[Any], Any] | None = None
    for part in path.split("."):
        name = part.split("[")[0]
        if name not in hints(group):
            return None
        hint = hints(group)[name]
        found = schema_fields(group)[name], hint
        group = group_of(hint) or item_group(hint) or type(None)
        if group is BackendConfig:
            group = BACKENDS.get(backend or "", BackendConfig)
        if not is_dataclass(group):
            return found if part == path.split(".")[-1] else None
    return found


def walk_schema(group: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """(path, field, type) of every key below `group`, each group before its keys."""
    for name, hint in hints(group).items():
        yield prefix + name, schema_fields(group)[name], hint
        if (inner := group_of(hint)) and inner is not BackendConfig:
            yield from walk_schema(inner, f"{prefix}{name}.")


def suggest_key(path: str, backend: str = "local") -> str | None:
    """The known path nearest to an unknown one, or None.

    The same name in another group counts most (`epochs` -> `trainer.epochs`), then a name
    spelled alike in the same group, then one spelled alike anywhere.
    """
    known = [p for p, _, _ in walk_schema(Config)]
    known += [p for p, _, _ in walk_schema(BACKENDS.get(backend, BackendConfig), "backend.")]
    return closest_key(path, known)


def closest_key(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` nearest to `name`, or None."""
    score, best = max((_likeness(name, candidate), candidate) for candidate in names)
    return best if score >= 0.7 else None


def _likeness(path: str, candidate: str) -> float:
    """Similarity of `candidate` to `path`: of the last names first, then of the groups."""
    parent, _, name = path.lower().replace("-", "_").rpartition(".")
    group, _, leaf = candidate.rpartition(".")
    score = SequenceMatcher(None, name, leaf).ratio()
    if len(name) >= 3 and leaf.startswith(name):
        score = max(score, 0.85)
    if score < 0.65:
        return 0.0
    if group == parent:
        return score + 0.15
    return score + 0.1 * SequenceMatcher(None, parent, group).ratio()
