"""What a script is, from its source. Imports only the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# What a plain script may import of ktrainer and still be routed.
_HELPERS = {"Callback", "all_gather", "barrier", "rank_zero_only", "register"}


def is_plain(source: bytes) -> bool:
    """Whether a script leaves training to Keras: it makes no use of ktrainer but for helpers.

    A script that does not compile is not routed either: running it says why.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return all(name in _HELPERS for name in _uses(tree))


def imports(source: bytes, package: str) -> bool:
    """Whether a script that compiles imports `package` or a part of it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == package for name in names)


def _uses(tree: ast.AST) -> Iterator[str]:
    """What a script uses of ktrainer, by name."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "ktrainer":
                    modules.add(alias.asname or alias.name)
                elif alias.name.startswith("ktrainer."):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ktrainer":
            if node.module == "ktrainer":
                yield from (alias.name for alias in node.names)
            else:
                yield str(node.module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield node.attr
