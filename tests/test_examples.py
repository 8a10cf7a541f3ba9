"""Every example, in real processes, with a few steps each."""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import gzip
import io
import re
import runpy
import shlex
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from ktrainer.cli import launch_config, run_command
from tests.dist.harness.group import ROOT
from tests.processes import ktrainer
from tests.tf_distribute.running import ONE_PROCESS, make_devices

EXAMPLES = ROOT / "examples"
FEW_STEPS = ["trainer.max_steps=3", "trainer.limit_val_batches=2", "logging.every=1ba"]

# Example -> what rank 0 says at the end.
SAYS = {
    "digits": r"validation accuracy 0\.\d+; the model is in .*digits\.keras",
    "mnist_cnn": r"validation: \{'loss': \d.*'accuracy': 0\.\d+",
    "shakespeare": r"--- a sample\nROMEO:[\s\S]{100,}---",
    "image_files": r"loss \d\.\d+\n$",
    "custom_callback": r"lowest loss [\d.]+ at step \d+, in 1 epochs",
    "vae": r"val_kl [\d.]+[\s\S]*(\n.{28}){14}\n$",
    "gan": r"g_loss [\d.]+[\s\S]*(\n.{28}){14}\n$",
}
SAYS_IN_STAGES = {
    "pipeline_mlp": r"validation accuracy 0\.\d+; the model is in .*mlp\.keras",
    "pipeline_manual": r"validation: \{'loss': \d.*'accuracy': 0\.\d+",
}

HYBRID = ["--config", str(ROOT / "configs" / "pipeline_hybrid.yaml")]
TWO_STAGES = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=4"]
PIPELINES = {  # processes, example and the words that run it in stages
    "mlp": (2, "pipeline_mlp"),
    "mlp in one process": (1, "pipeline_mlp", "backend=local"),
    "mlp, two copies": (4, "pipeline_mlp", *HYBRID),
    "manual, by scopes": (2, "pipeline_manual"),
    "shakespeare": (2, "shakespeare", *TWO_STAGES),
}


@pytest.fixture(scope="session")
def data_folder(shared_data: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real data where there is some, else files of the same kinds with made-up contents."""
    if shared_data is not None:
        return shared_data
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    write_idx(folder / "t10k-images-idx3-ubyte.gz", random.integers(0, 256, (400, 28, 28)))
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", random.integers(0, 10, 400))
    (folder / "input.txt").write_text("ROMEO:\nBut soft, what light?\n" * 2000)
    return folder


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


def _run_script(path: str, *words: str) -> str:
    """Run a script as `python path words...` would, in this rank; returns what it printed."""
    argv, modules, said = sys.argv, set(sys.modules), io.StringIO()
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.path.remove(str(Path(path).parent))
        sys.argv = argv
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                del sys.modules[name]
    return said.getvalue()


def _backend(size: int) -> list[str]:
    return ["backend=data_parallel"] if size > 1 else []


@pytest.mark.quick("digits-1")
@pytest.mark.parametrize(("name", "size"), [(name, 1 if name == "digits" else 2) for name in SAYS])
def test_example(ranks, data_folder, tmp_path, name, size):
    words = ["--data-dir", str(data_folder), *FEW_STEPS, f"run.dir={tmp_path}", *_backend(size)]
    said = ranks(size).run(_run_script, str(EXAMPLES / f"{name}.py"), *words, deadline=180)
    assert re.search(SAYS[name], said[0]), said[0]
    assert said[1:] == [""] * (size - 1), "only rank 0 may print"


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("case", PIPELINES)
def test_pipeline(ranks, data_folder, tmp_path, case):
    size, name, *words = PIPELINES[case]
    words = ["--data-dir", str(data_folder), *words, *FEW_STEPS, f"run.dir={tmp_path}"]
    said = ranks(size).run(_run_script, str(EXAMPLES / f"{name}.py"), *words, deadline=180)
    assert re.search({**SAYS, **SAYS_IN_STAGES}[name], said[0]), said[0]
    assert said[1:] == [""] * (size - 1), "only rank 0 may print"


def test_what_an_example_says_to_launch_passes_the_launcher_s_check(monkeypatch):
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    for path in EXAMPLES.rglob("*.py"):
        said = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", "")
        for line in re.findall(r"^ *ktrainer run (.*)", said, re.MULTILINE):
            args = parser.parse_args(shlex.split(line))
            assert args.check, line
            with monkeypatch.context() as patch:
                patch.chdir(ROOT)
                launch_config.checked_config(args.script, args.args, args.ranks, args.workers, {})


def test_data_that_cannot_be_downloaded_names_the_option(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import data
    import keras

    def fail(*_):
        raise Exception("URL fetch failure on https://x: None -- Network is unreachable")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    monkeypatch.setattr(keras.utils, "get_file", fail)
    for load in (data.mnist, data.shakespeare):
        with pytest.raises(SystemExit, match=r"URL fetch failure.*give --data-dir FOLDER"):
            load()


def test_no_example_is_forgotten():
    known = {*SAYS, *SAYS_IN_STAGES, "custom_loop", "data"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == known
    assert {path.stem for path in EXAMPLES.glob("custom_loops/*.py")} == {
        "data_parallel",
        "resumable",
        *("model_parallel" + end for end in ("", "_manual", "_hybrid", "_evaluation")),
    }


def _custom_loop(*words: str) -> str:
    return _run_script(str(EXAMPLES / "custom_loop.py"), "trainer.epochs=1", *words)


def _custom_loop_on_devices(*words: str) -> str:
    make_devices()
    return _custom_loop(*words)


@pytest.mark.exhaustive
def test_a_custom_loop_is_the_same_on_two_processes(ranks):
    (expected,) = ranks(1).run(_custom_loop, "backend=local", deadline=120)
    assert re.fullmatch(r"epoch 1  loss \d\.\d+  val_accuracy 0\.\d+\n", expected), expected
    said = ranks(2).run(_custom_loop, "backend=data_parallel", "backend.engine=mpi", deadline=120)
    assert said == [expected, ""]


@pytest.mark.exhaustive
def test_a_custom_loop_is_the_same_under_a_strategy(ranks):
    mirrored = ["backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=2"]
    runs = [["backend=local"], mirrored]
    said = [ranks(1, ONE_PROCESS).run(_custom_loop_on_devices, *words)[0] for words in runs]
    assert re.fullmatch(r"epoch 1  loss \d\.\d+  val_accuracy 0\.\d+\n", said[0]), said[0]
    numbers = [[float(word) for word in re.findall(r"\d\.\d+", text)] for text in said]
    (loss, accuracy), ours = numbers
    assert abs(ours[0] - loss) < 2e-4
    assert abs(ours[1] - accuracy) < 0.006  # two of 360 images


def _resumable(*words: str) -> str:
    script = str(EXAMPLES / "custom_loops" / "resumable.py")
    return _run_script(script, "logging.progress=none", *words)


@pytest.mark.exhaustive
def test_a_resumable_loop_continues_where_it_was(ranks, tmp_path):
    """Ended after 20 of 46 steps, in mid-epoch, and started again: the same last line."""
    folders = [f"run.dir={tmp_path / name}" for name in ("whole", "cut")]
    words = ("trainer.epochs=2", "checkpoint.every=10ba")
    (expected,) = ranks(1).run(_resumable, folders[0], *words, deadline=120)
    assert re.fullmatch(r"(epoch \d  loss \d\.\d+  val_accuracy 0\.\d+\n){2}", expected), expected
    ranks(1).run(_resumable, folders[1], *words, "trainer.max_steps=20", deadline=120)
    (found,) = ranks(1).run(_resumable, folders[1], *words, deadline=120)
    assert found == expected
    assert ranks(2).run(_resumable, "backend=data_parallel", *words[:1], deadline=120)[1] == ""


@pytest.mark.exhaustive
def test_a_data_parallel_loop_is_that_of_one_process(ranks, data_folder, tmp_path):
    """20 steps in float64 on two ranks and on one: the same losses, and the same weights."""
    script, said = str(EXAMPLES / "custom_loops" / "data_parallel.py"), {}
    weights = {}
    for size in (1, 2):
        path = tmp_path / f"{size}.weights.h5"
        words = ["--data-dir", str(data_folder), "--steps=20", "--dtype=float64"]
        said[size] = ranks(size).run(
            _run_script, script, *words, f"--checkpoint={path}", deadline=180
        )
        assert said[size][1:] == [""] * (size - 1), "only rank 0 may print"
        with h5py.File(path) as file:
            weights[size] = []
            file.visititems(
                lambda _, x, to=weights[size]: (
                    to.append(x[()]) if isinstance(x, h5py.Dataset) else None
                )
            )
    assert re.search(r"step 0  loss 2\.\d+\naccuracy 0\.\d+ after 20 steps", said[1][0])
    assert said[2][0] == said[1][0]
    assert len(weights[1]) == 8
    for one, two in zip(weights[1], weights[2], strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-10)


@pytest.mark.exhaustive
def test_a_data_parallel_loop_learns_mnist(ranks, shared_data):
    if shared_data is None:
        pytest.skip("needs MNIST's images: KTRAINER_DATA=FOLDER")
    script = str(EXAMPLES / "custom_loops" / "data_parallel.py")
    words = ["--data-dir", str(shared_data), "--steps=500"]
    said = ranks(2).run(_run_script, script, *words, deadline=300)
    accuracy = re.search(r"accuracy (0\.\d+) after 500", said[0])
    assert accuracy, said[0]
    assert float(accuracy[1]) > 0.9


@pytest.mark.exhaustive
def test_digits_learn_the_same_on_one_and_two_ranks(ranks, tmp_path):
    """The quick start's losses of ten steps: equal to float32 rounding."""
    losses = {}
    for size in (1, 2):
        words = ["trainer.max_steps=10", "logging.every=1ba", f"run.dir={tmp_path / str(size)}"]
        script = str(EXAMPLES / "digits.py")
        ranks(size).run(_run_script, script, *words, *_backend(size), deadline=180)
        with (tmp_path / str(size) / "metrics.csv").open() as file:
            losses[size] = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses[1]) > 10
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)


def test_config_file_takes_the_place_of_the_scripts_settings(ranks, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("trainer: {epochs: 2, limit_train_batches: 2, limit_val_batches: 1}\n")
    words = ["--config", str(file), f"run.dir={tmp_path / 'run'}"]
    (said,) = ranks(1).run(_run_script, str(EXAMPLES / "digits.py"), *words, deadline=180)
    assert "epoch 2/2" in said


def test_stop_at_is_known_by_name(ranks, tmp_path):
    goal = "callbacks={goal: {type: stop_at, metric: accuracy, value: 0.0}}"
    words = ["trainer.limit_train_batches=3", f"run.dir={tmp_path}", goal, *_backend(2)]
    script = str(EXAMPLES / "custom_callback.py")
    said = ranks(2).run(_run_script, script, *words, deadline=180)
    assert "in 1 epochs" in said[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_quick_start_through_the_launcher(tmp_path):
    """What `make train` runs, with fewer epochs: started and watched by `ktrainer run`."""
    words = ["backend=data_parallel", "trainer.epochs=2", f"run.dir={tmp_path}"]
    done = ktrainer("launch", "-n", 2, "examples/digits.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes, backend data_parallel" in done.stdout
    accuracy = re.search(r"validation accuracy ([\d.]+)", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 0.85
    assert (tmp_path / "digits.keras").is_file()
    assert done.stderr == ""
