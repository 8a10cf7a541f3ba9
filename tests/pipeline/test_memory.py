"""What a stage takes of memory: its share, and not the model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory_script.py")


@pytest.mark.slow
def test_a_process_takes_its_share_of_a_model_of_200_mb(tmp_path: Path) -> None:
    """Weights, gradients, Adam's slots and activations in flight, within 15 per cent, beyond what
    the same code takes with tiny layers. Both processes hold half of the model."""
    command = [sys.executable, "-m", "ktrainer.cli", "launch", "-n", "2", str(SCRIPT), "1448"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        assert facts["model"] > 200e6
        taken = facts["grown"] - facts["code"]
        assert taken < 1.15 * facts["share"], facts
        assert taken > 0.9 * facts["share"], facts  # else something is measured wrongly
