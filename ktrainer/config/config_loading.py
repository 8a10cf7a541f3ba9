"""Load the configuration of a run: schema < script < YAML < command line, merged strictly.

    layers (script, file, key=value) -> choose the backend -> unknown keys -> merge onto the schema
    -> resolve ${...} -> types -> bounds and contradictions -> frozen `Config`

Nothing here starts a process or imports TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from os import PathLike, fspath
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ktrainer.config.backend_keys import ALIASES, BACKENDS
from ktrainer.config.config_sources import as_written, read_overrides, read_source
from ktrainer.config.key_errors import check_keys, lookup, translate
from ktrainer.config.redact import is_secret_name, redact
from ktrainer.config.schema import SCRIPT, Config
from ktrainer.config.schema_fields import choices, hints
from ktrainer.config.script_parameters import as_parameters, checked_parameters
from ktrainer.config.strategy_checks import with_sharding
from ktrainer.config.value_checks import check_values
from ktrainer.errors import ConfigError

_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")


def load_config(
    source: Any = None,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    on_unknown_callback: Callable[[ConfigError], None] | None = None,
    before_script: bool = False,
) -> Config:
    """Merge the schema's defaults, `defaults`, `source` and `overrides`; the later ones win.

    Args:
        source: path of a YAML file, a nested dict, an OmegaConf `DictConfig`, a `Config`, or
            None for the defaults alone.
        overrides: words `key=value`, the value read as YAML: `trainer.epochs=3`,
            `backend=data_parallel`. Naming a backend replaces the one in `source`, its keys
            included. Their order matters only for the same key, where the last word wins.
        defaults: a script's own defaults, a nested dict, over the schema's. `user` in it names the
            script's parameters; without `defaults` that in `source` does.
        on_unknown_callback: called with the error for each callback whose name is not registered,
            instead of raising it; for tools that run without the user's script.
        before_script: leave to a script, which has defaults of its own, what these may settle:
            contradictions with keys that are not set, a backend that is not named or lacks required
            keys, and callbacks' names.

    Returns:
        The frozen configuration, checked and with all `${...}` resolved.

    Raises:
        ConfigError: for an unknown key, a wrong type or value, a required value that is not
            set, a contradiction, or a file that cannot be read.
    """
    if isinstance(source, Config) and not overrides:
        return source
    layers = [read_source(defaults), read_source(source), _tree(read_overrides(overrides))]
    layers = [_with_named_backend(layer) for layer in layers]
    if before_script:
        layers = _without_open_backend(layers)
        on_unknown_callback = on_unknown_callback or (lambda _error: None)
    secrets = (*getattr(source, "_secrets", ()), *_secret_values(layers))
    try:
        config = with_sharding(_make(layers))
        user: Mapping[str, Any] = config.user
        if on_unknown_callback is None:  # else the script, which knows them, does not run here
            named = layers[1 if defaults is None else 0].get("user") or {}
            user = checked_parameters(user, named)
        config = replace(config, user=as_parameters(user))
        object.__setattr__(config, "_secrets", tuple(dict.fromkeys(secrets)))
        object.__setattr__(config, "_origins", _origins(source, *layers))
        check_values(config, on_unknown_callback, before_script)
    except ConfigError as error:
        raise _without_secrets(error, secrets) from None
    return config


def _origins(
    source: Any, defaults: dict[str, Any], layer: dict[str, Any], words: dict[str, Any]
) -> dict[str, str]:
    """The origin of each key that was set; a dict in code is the script's."""
    known = _key_origins(defaults, SCRIPT)
    if isinstance(source, Config):
        known |= source._origins
    else:
        file = isinstance(source, (str, PathLike))
        known |= _key_origins(layer, fspath(source) if file else SCRIPT)
    return known | _key_origins(words, "command line")


def _key_origins(layer: Mapping[str, Any], origin: str, path: str = "") -> dict[str, str]:
    """The dotted keys that a layer of the configuration sets, each with `origin`."""
    found: dict[str, str] = {}
    for key, value in layer.items():
        inner = f"{path}.{key}" if path else str(key)
        nested = isinstance(value, Mapping)
        found |= _key_origins(value, origin, inner) if nested else {inner: origin}
    return found


def _without_secrets(error: ConfigError, secrets: Sequence[str]) -> ConfigError:
    """`error`, or a copy in which `secrets` are redacted."""
    if redact(str(error), secrets) == str(error):
        return error
    clean = ConfigError(redact(str(error), secrets))
    clean.path, clean.value = error.path, redact(error.value, secrets)
    return clean


def _make(layers: list[dict[str, Any]]) -> Config:
    """The typed configuration of `layers`, its values not yet checked."""
    name, keys = _choose_backend(layers)
    for layer in layers:
        check_keys({k: v for k, v in layer.items() if k != "backend"}, name)
    check_keys({"backend": keys}, name)
    raw = _merge_plain(*[{k: v for k, v in layer.items() if k != "backend"} for layer in layers])
    raw["backend"] = {**keys, "name": name}
    return _build(_with_off(raw, name), name)


def _with_off(raw: Any, backend: str, path: str = "") -> Any:
    """`raw` with `off` where that is a choice, which YAML reads as false."""
    if isinstance(raw, dict):
        items = {key: (f"{path}.{key}" if path else str(key), raw[key]) for key in raw}
        return {key: _with_off(value, backend, inner) for key, (inner, value) in items.items()}
    if raw is False and (found := lookup(path, backend)) and "off" in choices(found[1]):
        return "off"
    return raw


def _tree(words: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """The nested dict of dotted keys; a later word wins, and a whole backend comes before its
    keys."""
    words = sorted(words, key=lambda word: word[0] not in ("backend", "backend.name"))
    tree: dict[str, Any] = {}
    for path, given, text in words:
        *groups, leaf = path.split(".")
        nested: dict[str, Any] = {leaf: _as_meant(path, given, text)}
        for group in reversed(groups):
            nested = {group: nested}
        tree = _merge_plain(tree, nested)
    return tree


def _as_meant(path: str, value: Any, text: str) -> Any:
    """An override's value as the key's type has it, where YAML reads another one."""
    if path == "backend" and not isinstance(value, dict):
        return {"name": value}
    return as_written(path, value, text)


def _merge_plain(*trees: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts merged key by key, the last one winning."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            old = merged.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            merged[key] = _merge_plain(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _with_named_backend(layer: dict[str, Any]) -> dict[str, Any]:
    """`layer` with `backend: NAME` as `backend: {name: NAME}`."""
    given = layer.get("backend")
    return {**layer, "backend": {"name": given}} if isinstance(given, str) else layer


def _without_open_backend(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`layers` without keys of backends, if none is named or it lacks required keys, which the
    script may give. Unknown keys are refused, or kept."""
    given = {i: layer["backend"] for i, layer in enumerate(layers) if "backend" in layer}
    if any(not isinstance(keys, dict) or "name" in keys for keys in given.values()):
        name, keys = _choose_backend(layers)
        if all(key in keys for key, value in vars(BACKENDS[name]()).items() if value == MISSING):
            return layers
        check_keys({"backend": keys}, name)
        return [{k: v for k, v in layer.items() if k != "backend"} for layer in layers]
    known = {key for backend in BACKENDS.values() for key in hints(backend)}
    unknown = {i: {k: keys[k] for k in keys.keys() - known} for i, keys in given.items()}
    return [
        {**layer, "backend": unknown[i]} if i in unknown else layer
        for i, layer in enumerate(layers)
    ]


def _choose_backend(layers: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The backend's name and its keys: a layer that names another backend drops the keys before."""
    name, keys = "local", dict[str, Any]()
    for layer in layers:
        if "backend" not in layer:
            continue
        given = layer["backend"]
        if not isinstance(given, dict):
            known = ", ".join(BACKENDS)
            message = f"name a backend ({known}), or give its keys with its name, not {given!r}."
            raise ConfigError(message, path="backend", value=given)
        if "name" in given:
            before, name = name, _backend_name(given["name"], layers)
            keys = keys if name == before else {}
        keys = _merge_plain(keys, {k: v for k, v in given.items() if k != "name"})
    return name, keys


def _backend_name(given: Any, layers: list[dict[str, Any]]) -> str:
    if isinstance(given, str) and "${" in given:
        others = [{k: v for k, v in layer.items() if k != "backend"} for layer in layers]
        raw = {**_merge_plain(*others), "backend": {"name": given}}
        try:
            given = OmegaConf.create(_merge_plain(Config().to_dict(), raw)).backend.name
        except OmegaConfBaseException as error:
            raise translate(error, raw, "local", path="backend.name") from None
    if given in BACKENDS:
        return str(given)
    known = ", ".join(BACKENDS)
    if given in ALIASES:
        message = f"{given!r} is no backend here: write {ALIASES[given]}."
        raise ConfigError(message, path="backend", value=given)
    message = f"there is no backend {given!r}; there are {known}."
    raise ConfigError(message, path="backend", value=given, known=BACKENDS)


@cache
def _schema(backend: str) -> DictConfig:
    """The schema as an OmegaConf node to merge onto; cached, as it takes most of the time."""
    base = OmegaConf.structured(Config(backend=BACKENDS[backend]()))
    OmegaConf.set_readonly(base, False)
    return cast(DictConfig, base)


def _build(raw: dict[str, Any], backend: str) -> Config:
    """The typed configuration of the merged layers, `${...}` resolved."""
    try:
        node = cast(DictConfig, OmegaConf.merge(_schema(backend), OmegaConf.create(raw)))
        # Merging `???` onto a default keeps the default, but it was asked to be required.
        missing = sorted({*map(str, OmegaConf.missing_keys(node)), *_required(raw)})
        if not missing:
            config = cast(Config, OmegaConf.to_object(node))
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise translate(error, raw, backend) from None
    if missing:
        them = ", ".join(f"{key}=..." for key in missing)
        raise ConfigError(f"a required value is not set: give {them}", path=missing[0], value="???")
    tries = int(config.trainer.fast_dev_run)
    callbacks = {name: spec for name, spec in config.callbacks.items() if spec is not None}
    return replace(config, trainer=replace(config.trainer, fast_dev_run=tries), callbacks=callbacks)


def _required(raw: Any, path: str = "") -> list[str]:
    """Dotted paths of the values that are `???`."""
    if isinstance(raw, dict):
        items = [(f"{path}.{key}" if path else key, value) for key, value in raw.items()]
    elif isinstance(raw, list):
        items = [(f"{path}[{i}]", value) for i, value in enumerate(raw)]
    else:
        return [path] if raw == "???" else []
    return [found for inner, value in items for found in _required(value, inner)]


def _secret_values(raw: Any) -> list[str]:
    """Values of the environment variables in `raw` with secret names."""
    import os

    if isinstance(raw, dict):
        return [s for value in raw.values() for s in _secret_values(value)]
    if isinstance(raw, list):
        return [s for value in raw for s in _secret_values(value)]
    names = _ENV.findall(raw) if isinstance(raw, str) else []
    return [os.environ[n] for n in names if is_secret_name(n) and os.environ.get(n)]
