"""The reference of the keys, from the schema's docstrings; a configuration as commented YAML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING

from ktrainer.config.backend_keys import BACKENDS, BackendConfig
from ktrainer.config.config_sources import escape
from ktrainer.config.key_errors import suggest_key
from ktrainer.config.redact import redact
from ktrainer.config.schema import Config
from ktrainer.config.schema_fields import (
    default_of,
    expected,
    group_of,
    hints,
    item_group,
    schema_fields,
)
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
        comments: describe each key above it.
    """
    values = config.to_dict(redacted=redacted)
    return _group_yaml(config, escape(values), 0, comments)


def config_diff(config: Config) -> dict[str, Any]:
    """The keys that differ from the defaults, nested as in a YAML file; `load_config` of it gives
    the same configuration. Not redacted."""
    defaults = Config(backend=BACKENDS[config.backend.name]()).to_dict()
    changed = _differing(config.to_dict(), defaults)
    if config.backend.name != Config().backend.name:
        changed["backend"] = {"name": config.backend.name, **changed.get("backend", {})}
    return changed


def _differing(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key, MISSING)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _differing(value, default):
                found[key] = inner
        elif not _same(value, default):
            found[key] = value
    return found


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def diff_yaml(config: Config) -> str:
    """The keys that differ from the defaults, as YAML, secrets redacted."""
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
        ConfigError: for an unknown key.
    """
    entries = _all_entries()
    if key is not None:
        prefixes = (f"{key} ", f"{key}.", f"{key}=", f"{key}[")
        entries = [e for e in entries if f"{e.path} ".startswith(prefixes)]
        if not entries:
            near = suggest_key(key)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"there is no such key.{hint}", path=key)
    wrapped = [
        f"{textwrap.fill(e.heading, _WIDTH - 4, subsequent_indent='    ')}\n{_indented(e.text)}\n"
        for e in entries
    ]
    return "".join(wrapped)


def reference_markdown() -> str:
    """The reference of all keys as a Markdown page: a section for each group, a table of its keys.

    `ktrainer config --reference` prints it; the documentation's page is this text.
    """
    sections = [_REFERENCE_HEAD]
    keys: list[KeyEntry] = []
    for entry in _all_entries():
        if entry.takes is None:
            sections += [_table(keys), f"## {entry.path}\n\n{_markdown(entry.text)}"]
            keys = []
        else:
            keys.append(entry)
    return "\n\n".join(part for part in [*sections, _table(keys)] if part) + "\n"


_REFERENCE_HEAD = """\
# Configuration keys

<!-- Generated by `ktrainer config --reference`; edit the docstrings in ktrainer/config instead. -->

Each key is set in a YAML file or on the command line, as `trainer.epochs=3`; a key that is not set
has its default. `ktrainer config --describe KEY` prints one entry of this page, and `ktrainer
config --config FILE key=value` the configuration that a run would use."""


def _table(keys: Sequence[KeyEntry]) -> str:
    if not keys:
        return ""
    rows = [
        f"| `{key.path}` | {_markdown(key.takes or '')} | {_default_cell(key)} | "
        f"{_markdown(key.text)} |"
        for key in keys
    ]
    return "\n".join(["| Key | Takes | Default | Meaning |", "|---|---|---|---|", *rows])


def _default_cell(key: KeyEntry) -> str:
    return "required" if key.default is None else f"`{key.default}`"


def _markdown(text: str) -> str:
    """`text` as a table cell shows it: without characters that Markdown takes for markup."""
    return re.sub(r"([|<*])", r"\\\1", text)


def _indented(text: str) -> str:
    start = " " * 6
    return textwrap.fill(text, _WIDTH - 4, initial_indent=start, subsequent_indent=start)


class KeyEntry(NamedTuple):
    """A key or a group of keys in the reference.

    `takes` is None for a group; `default` is None for a group and for a required key.
    """

    path: str
    text: str
    takes: str | None = None
    default: str | None = None

    @property
    def heading(self) -> str:
        """The key with its type and default."""
        shown = "required" if self.default is None else f"default {self.default}"
        return self.path if self.takes is None else f"{self.path} ({self.takes}; {shown})"


def _all_entries() -> list[KeyEntry]:
    entries = _entries(Config, "")
    for name, group in BACKENDS.items():
        entries.append(KeyEntry(f"backend={name}", summary(group)))
        entries += [e for e in _entries(group, "backend.") if e.path != "backend.name"]
    return entries


def _entries(group: type, prefix: str) -> list[KeyEntry]:
    """A group's keys, then its inner groups with theirs."""
    docs = key_docs(group)
    found: list[KeyEntry] = []
    inner_groups: list[KeyEntry] = []
    for name, hint in hints(group).items():
        path, item = prefix + name, schema_fields(group)[name]
        inner = group_of(hint)
        if inner is BackendConfig:
            inner_groups.append(KeyEntry(path, f"{docs[name]} Default: local."))
        elif inner is not None:
            inner_groups.append(KeyEntry(path, summary(inner)))
            inner_groups += _entries(inner, f"{path}.")
        else:
            default = default_of(item)
            shown = None if default == MISSING else _inline(default)
            found.append(KeyEntry(path, docs[name], expected(item, hint), shown))
        if entry := item_group(hint):
            found += _entries(entry, f"{path}[].")
    return found + inner_groups


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
