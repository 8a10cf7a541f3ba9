"""A script and a configuration that `ktrainer plan` is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan_report.scripts import SCRIPT


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("backend: {name: pipeline, partitions: 2, microbatches: 4}\n")
    return str(path)
