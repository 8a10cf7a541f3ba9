"""Read the layers of a configuration: a file, a dict, or `key=value` words."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from ktrainer.config.key_errors import lookup
from ktrainer.config.redact import is_secret_name, redact_text
from ktrainer.config.schema_fields import alternatives
from ktrainer.errors import ConfigError, nearest

# A real configuration has some hundred entries; a file that expands to far more is an attack or
# a mistake, and would exhaust the memory.
_MOST_BYTES = 1_000_000
_MOST_NODES = 50_000
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError)


def read_source(source: Any) -> dict[str, Any]:
    """The unresolved nested dict in a path, dict, `DictConfig`, `Config`, or None.

    Raises:
        ConfigError: if a file is missing or is no YAML, or the source is of another kind.
    """
    if source is None:
        return {}
    if isinstance(source, (str, PathLike)):
        return _read_file(Path(fspath(source)))
    if isinstance(source, DictConfig):
        return _plain_dict(OmegaConf.to_container(source, resolve=False))
    if is_dataclass(source) and not isinstance(source, type):
        shallow = {f.name: getattr(source, f.name) for f in fields(source)}
        return {k: escape(read_source(v) if is_dataclass(v) else v) for k, v in shallow.items()}
    if isinstance(source, Mapping):
        return _plain_dict(source)
    raise ConfigError(
        f"a configuration is a path, a dict or nothing, not {type(source).__name__}.", value=source
    )


def escape(value: Any) -> Any:
    """`value` with `${` escaped, so that reading it again gives the same value."""
    if is_dataclass(value) and not isinstance(value, type):
        return read_source(value)
    if isinstance(value, dict):
        return {k: escape(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape(v) for v in value]
    if isinstance(value, str) and "${" in value:
        return value.replace("${", r"\${")
    return value


def _plain_dict(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], plain(value, ""))


def plain(value: Any, path: str) -> Any:
    """`value` as plain dicts, lists and numbers; paths become text, NumPy scalars numbers."""
    if isinstance(value, Mapping):
        if path == "backend.stages":  # where keys are numbers
            value = {str(k) if type(k) is int else k: v for k, v in value.items()}
        for key in value:
            if not isinstance(key, str):
                where = path or "the configuration"
                raise ConfigError(f"keys are text, but {where} has {key!r}.", path=path or None)
        return {k: plain(v, f"{path}.{k}" if path else k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return read_source(value)
    if isinstance(value, PathLike):
        return fspath(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ConfigError(
        f"a configuration holds plain values, not {type(value).__name__}. Make objects in code; "
        "callbacks go to Trainer(cfg, callbacks=[...]).",
        path=path or None,
        value=value,
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes: no configuration.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml")))
        hint = f" Did you mean {str(path.with_name(near))!r}?" if near else ""
        message = f"there is no configuration file {str(path)!r}.{hint}"
        raise ConfigError(message, value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the configuration file {str(path)!r}: {error}"
        raise ConfigError(message, value=str(path)) from None
    return read_yaml(text, str(path))


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """The nested dict in YAML `text`; `name` is shown in errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(root, name)
        loaded = OmegaConf.load(io.StringIO(text))
    except _UNREADABLE as error:
        message = f"{name} is not valid YAML: {_brief(error)}"
        raise ConfigError(message, value=name) from None
    content = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must hold keys and values at its top level.", value=name)
    return cast(dict[str, Any], _as_written(_plain_dict(content), root, ""))


def _as_written(value: Any, node: yaml.Node | None, path: str) -> Any:
    """The `value` of a YAML node, with text as it is written."""
    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        nodes = {key.value: inner for key, inner in node.value}
        return {
            key: _as_written(inner, nodes.get(key), f"{path}.{key}" if path else key)
            for key, inner in value.items()
        }
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        pairs = enumerate(zip(value, node.value, strict=True))
        return [_as_written(inner, part, f"{path}[{i}]") for i, (inner, part) in pairs]
    return as_written(path, value, node.value) if isinstance(node, yaml.ScalarNode) else value


def as_written(path: str, value: Any, text: str) -> Any:
    """`value`, or its `text` where the key takes text and YAML reads another type."""
    found = lookup(path)
    if found and str in alternatives(found[1]) and isinstance(value, (bool, int, float)):
        return text.strip()  # run.dir=0012 is a name, not the number 10
    return value


def _brief(error: Exception) -> str:
    """The problem and its line and column, without the text around it, which may hold a secret."""
    if isinstance(error, GrammarParseError):
        return "an interpolation ${...} is not complete; plain text is written \\${...}."
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem and mark:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return str(error).splitlines()[0]


def _check_size(root: yaml.Node | None, name: str) -> None:
    """Refuse YAML whose aliases expand to more than can be meant, without expanding it."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise ConfigError(f"{name} has an alias that contains itself.", value=name)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                parts = node.value
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
            open_nodes.discard(id(node))
        return sizes[id(node)]

    try:
        too_much = root is not None and size(root) > _MOST_NODES
    except RecursionError:
        too_much = True
    if too_much:
        raise ConfigError(f"{name} expands to more than {_MOST_NODES} entries.", value=name)


def read_overrides(overrides: Iterable[str]) -> list[tuple[str, Any, str]]:
    """(dotted path, value, its text) of each `key=value`; values are read as YAML.

    Raises:
        ConfigError: for a word that is no `key=value`.
    """
    if isinstance(overrides, str):
        raise ConfigError("overrides are a list of 'key=value', not one text.", value=overrides)
    return [_read_override(word) for word in overrides]


def _read_override(word: str) -> tuple[str, Any, str]:
    key, equals, text = str(word).partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{word!r} is no override: write key=value, such as trainer.epochs=3.")
    if key[0] in "+~-":
        raise ConfigError(f"keys have no prefix: write {key.lstrip('+~-')}=VALUE.", path=key)
    if "[" in key:
        message = "items of a list cannot be set one by one: give the whole list, or use a file."
        raise ConfigError(message, path=key)
    if not all(key.split(".")):
        raise ConfigError("a key is names joined by single dots, such as trainer.epochs.", path=key)
    if len(text) > _MOST_BYTES:
        raise ConfigError("the value is too long.", path=key)
    if not text.strip():
        raise ConfigError(
            "there is nothing after the =, as where the name of a shell variable is misspelt. Give "
            f"a value; {key}=null is none, and {key}=\"''\" an empty text.",
            path=key,
        )
    return key, _read_value(key, text), text


def _read_value(key: str, text: str) -> Any:
    try:
        if "&" in text and "*" in text:
            _check_size(yaml.compose(text, Loader=yaml.SafeLoader), key)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except _UNREADABLE as error:
        shown = "***" if is_secret_name(key) else repr(redact_text(text))
        message = f"cannot read the value {shown}: {_brief(error)}"
        if getattr(error, "problem", None) == "found unexpected ':'":
            message += ". YAML wants a space after each colon: {key: value}."
        raise ConfigError(message, path=key) from None
    assert isinstance(value, dict)
    return plain(value["value"], key)
