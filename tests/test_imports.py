"""No circle of imports between the files of the package, imports for types included."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ktrainer"


def modules(package: Path) -> dict[str, Path]:
    """Every file of a package, by the name that it is imported by."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, files: dict[str, Path]) -> set[str]:
    """The modules of the package that a file names, anywhere in it.

    `from package import module` is an arrow to the module alone: that Python runs the package's
    `__init__` before it makes no circle between two files.
    """
    found = set()
    folder = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(files[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= {each if each in files else module for each in inner}
    return {each for each in found if each in files and each != name}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Each circle that a walk along the arrows closes, as its modules in order."""
    found: list[list[str]] = []
    done: set[str] = set()
    path: list[str] = []

    def walk(name: str) -> None:
        path.append(name)
        for target in sorted(arrows[name] - done):
            if target in path:
                found.append(path[path.index(target) :])
            else:
                walk(target)
        done.add(path.pop())

    for name in sorted(arrows):
        if name not in done:
            walk(name)
    return found


def test_files_import_one_way() -> None:
    files = modules(PACKAGE)
    found = circles({name: imports(name, files) for name in files})
    said = [f"{circle[-1]} -> {circle[0]} closes {' -> '.join(circle)}" for circle in found]
    assert not said, "\n".join(said)


def test_a_circle_is_found_with_the_arrow_that_closes_it(tmp_path: Path) -> None:
    package = tmp_path / "made"
    (package / "inner").mkdir(parents=True)
    texts = {
        "__init__.py": "",
        "a.py": "from made import b",
        "b.py": "def late():\n    from .inner.c import value",
        "inner/__init__.py": "",
        "inner/c.py": "if TYPE_CHECKING:\n    from ..a import A",
        "d.py": "import made.a\nfrom made.inner import c",
    }
    for name, text in texts.items():
        (package / name).write_text(text)
    files = modules(package)
    arrows = {name: imports(name, files) for name in files}
    assert arrows["made.d"] == {"made.a", "made.inner.c"}
    assert circles(arrows) == [["made.a", "made.b", "made.inner.c"]]
