"""The keys' reference, from the schema's docstrings, and a configuration as commented YAML."""

from __future__ import annotations

import re
import textwrap
from dataclasses import is_dataclass
from typing import Any

import yaml

from ktrainer.config.backends import BACKENDS, BackendConfig
from ktrainer.config.compare import config_diff
from ktrainer.config.redact import redact
from ktrainer.config.schema import Config
from ktrainer.config.schematree import (
    default_of,
    expected,
    group_of,
    hints,
    item_group,
    schema_fields,
    suggest,
)
from ktrainer.config.sources import escape
from ktrainer.errors import ConfigError

_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")
_WIDTH = 100


def key_docs(group: Any) -> dict[str, str]:
    """{key: description} from the `Attributes` section of a group's docstring."""
    body = textwrap.dedent("    " + (group.__doc__ or "")).partition("Attributes:\n")[2]
    found: dict[str, list[str]] = {}
    name = ""
    for line in textwrap.dedent(body).splitlines():
        if match := _ENTRY.match("    " + line):
            name = match[1]
            found[name] = [match[2]]
        elif name and line.strip():
            found[name].append(line.strip())
    return {key: " ".join(lines) for key, lines in found.items()}


def summary(group: type) -> str:
    """The first line of a group's docstring."""
    return (group.__doc__ or "").strip().splitlines()[0]


def resolved_yaml(config: Config, redacted: bool = True, comments: bool = True) -> str:
    """The configuration as YAML that `load_config` reads.

    Args:
        redacted: replace secrets by `***`; such a file is for reading, not for running again.
        comments: say above each key what it does.
    """
    values = config.to_dict(redacted=redacted)
    return _group_yaml(config, escape(values), 0, comments)


def diff_yaml(config: Config) -> str:
    """What differs from the defaults, as YAML, secrets redacted."""
    return _dump(escape(redact(config_diff(config), config._secrets)))


def _group_yaml(group: Any, values: dict[str, Any], indent: int, comments: bool) -> str:
    docs = key_docs(type(group))
    lines: list[str] = []
    for name in schema_fields(type(group)):
        inner = getattr(group, name)
        is_group = is_dataclass(inner)
        if comments:
            if indent == 0 and lines:
                lines.append("")
            text = summary(type(inner)) if is_group else docs.get(name, "")
            lines.append(_comment(text, indent))
        if is_group:
            lines.append(f"{' ' * indent}{name}:")
            lines.append(_group_yaml(inner, values[name], indent + 2, comments).rstrip("\n"))
        else:
            entry = _dump({name: values[name]}).rstrip("\n")
            lines.append(textwrap.indent(entry, " " * indent))
    return "\n".join(lines) + "\n"


def _dump(values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=_WIDTH)


def _comment(text: str, indent: int) -> str:
    start = " " * indent + "# "
    return textwrap.fill(text, _WIDTH - 4, initial_indent=start, subsequent_indent=start)


def describe(key: str | None = None) -> str:
    """The reference of all keys, or of one key or group, from the schema's docstrings.

    Raises:
        ConfigError: for a key that there is not.
    """
    entries = _entries(Config, "")
    for name, group in BACKENDS.items():
        entries.append((f"backend={name}", summary(group)))
        entries += [e for e in _entries(group, "backend.") if not e[0].startswith("backend.name")]
    if key is not None:
        prefixes = (f"{key} ", f"{key}.", f"{key}=", f"{key}[")
        entries = [e for e in entries if f"{e[0]} ".startswith(prefixes)]
        if not entries:
            near = suggest(key)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"there is no such key.{hint}", path=key)
    parts = [textwrap.fill(head, _WIDTH - 4, subsequent_indent=" " * 4) for head, _ in entries]
    texts = [_indented(text) for _, text in entries]
    return "\n".join(line for pair in zip(parts, texts, strict=True) for line in pair) + "\n"


def _indented(text: str) -> str:
    start = " " * 6
    return textwrap.fill(text, _WIDTH - 4, initial_indent=start, subsequent_indent=start)


def _entries(group: type, prefix: str) -> list[tuple[str, str]]:
    """(key with type and default, description) of a group's keys, those of its groups below."""
    docs, found = key_docs(group), []
    for name, hint in hints(group).items():
        path, item = prefix + name, schema_fields(group)[name]
        inner = group_of(hint)
        if inner is BackendConfig:
            found.append((path, f"{docs[name]} Default: local."))
        elif inner is not None:
            found.append((path, summary(inner)))
            found += _entries(inner, f"{path}.")
        else:
            default = default_of(item)
            shown = "required" if default == "???" else f"default {_inline(default)}"
            found.append((f"{path} ({expected(item, hint)}; {shown})", docs[name]))
        if entry := item_group(hint):
            found += _entries(entry, f"{path}[].")
    return found


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
