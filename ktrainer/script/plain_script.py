"""Classify a script by its source. Imports only the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# What only a script with its own Trainer, or with its own steps, uses.
_NAMES = {"Trainer", "Config", "load_config"}
_MODULES = {"trainer", "config", "backends", "steps", "dataparallel", "modelparallel"}


def is_plain(source: bytes) -> bool:
    """Return whether a script trains with Keras: it uses neither a Trainer nor a configuration, nor
    communicates itself.

    False for a script that does not compile: running it reports the error.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return (_NAMES | _MODULES).isdisjoint(_uses(tree))


def imports_package(source: bytes, package: str) -> bool:
    """Return whether a script that compiles imports `package` or a module of it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == package for name in names)


def _uses(tree: ast.AST) -> Iterator[str]:
    """The names of ktrainer that a script uses."""
    modules, everything = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "ktrainer":
                    modules.add(alias.asname or alias.name)
                elif alias.name.startswith("ktrainer."):
                    yield from alias.name.split(".")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ktrainer":
            yield from str(node.module).split(".")
            yield from (alias.name for alias in node.names)
            everything |= node.names[0].name == "*"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield node.attr
        elif everything and isinstance(node, ast.Name) and node.id in _NAMES:
            yield node.id  # `import *` brings no modules: `steps` is a variable of the script
