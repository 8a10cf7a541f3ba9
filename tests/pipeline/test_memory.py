"""What a stage takes of memory: its share, and not the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import ktrainer

SCRIPT = Path(__file__).with_name("memory_script.py")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_takes_its_share_of_a_model_of_200_mb(tmp_path: Path) -> None:
    """Weights, gradients, Adam's slots and activations in flight, within 15 per cent, above what
    the process had taken after training tiny layers. Each process holds half of the model, of which
    there are two copies, which sum their gradients where they are."""
    processes, layers, width = 4, 12, 2048
    done = ktrainer("launch", "-n", processes, SCRIPT, layers, width, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(processes):
        facts = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        assert facts["model"] > 200e6
        print(f"rank {rank} took {facts['grown'] / facts['share']:.3f} of its share")
        assert facts["share"] < facts["grown"] < 1.15 * facts["share"], facts
