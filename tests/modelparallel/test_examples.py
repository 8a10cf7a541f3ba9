"""The scripts of `examples/custom_loops` in stages: weights of one process, and accuracy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.dist.harness import Ranks
from tests.test_examples import EXAMPLES, _run_script, write_idx

SCRIPTS = {
    "model_parallel": 2,
    "model_parallel_manual": 2,
    "model_parallel_hybrid": 4,
    "model_parallel_evaluation": 2,
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder, random = tmp_path / "data", np.random.default_rng(0)
    folder.mkdir()
    write_idx(folder / "t10k-images-idx3-ubyte.gz", random.integers(0, 256, (1000, 28, 28)))
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", random.integers(0, 10, 1000))
    return folder


def arrays(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, x: found.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None
        )
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_those_of_one_process(
    ranks: Callable[..., Ranks], images: Path, tmp_path: Path, name: str
) -> None:
    found = {}
    for size, partitions in ((1, 1), (SCRIPTS[name], 2)):
        path = tmp_path / f"{size}.weights.h5"
        words = ["--data-dir", str(images), "--epochs=1", "--steps=3", "--dtype=float64"]
        words += [f"--partitions={partitions}", f"--weights={path}"]
        script = str(EXAMPLES / "custom_loops" / f"{name}.py")
        said = ranks(size).run(_run_script, script, *words, deadline=180)
        assert re.search(r"epoch 1  loss \d\.\d+  accuracy 0\.\d+\n", said[0]), said[0]
        assert said[1:] == [""] * (size - 1), "only rank 0 may print"
        found[size] = arrays(path)
    one, many = found[1], found[SCRIPTS[name]]
    assert set(one) == set(many)
    for key, value in one.items():
        np.testing.assert_allclose(many[key], value, rtol=0, atol=1e-10, err_msg=key)


@pytest.mark.exhaustive
def test_learns_mnist(
    ranks: Callable[..., Ranks], shared_data: Path | None, tmp_path: Path
) -> None:
    if shared_data is None:
        pytest.skip("needs MNIST's images: KTRAINER_DATA=FOLDER")
    script = str(EXAMPLES / "custom_loops" / "model_parallel_evaluation.py")
    words = ["--data-dir", str(shared_data), "--epochs=2", "--steps=150"]
    words += [f"--checkpoints={tmp_path}"]
    said = ranks(2).run(_run_script, script, *words, deadline=300)
    assert float(re.findall(r"accuracy (\d\.\d+)", said[0])[-1]) > 0.9, said[0]
