"""The docstring of a package is its map: it names every file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ktrainer

ROOT = Path(ktrainer.__file__).parent
PACKAGES = [path.parent for path in ROOT.rglob("__init__.py") if path.parent != ROOT]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_names_its_files(package: Path) -> None:
    words = set(re.findall(r"\w+", (package / "__init__.py").read_text()))
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert sorted(files - words) == []
