"""What TensorBoard gets besides scalars, read back from its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Callback, ConfigError, Trainer
from ktrainer.callbacks import TensorBoardLog
from ktrainer.config import load_config
from tests.contracts.running import with_ktrainer
from tests.contracts.zoo import ZOO
from tests.processes import script
from tests.small import build, data

Values = dict[tuple[str, int], Any]


def written(folder: Path) -> tuple[Values, list[Any]]:
    """Tensors by name and step, and graphs."""
    values: Values = {}
    graphs = []
    for file in sorted(folder.glob("train/events*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            if event.graph_def:
                graphs.append(tf.compat.v1.GraphDef.FromString(event.graph_def))
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                tensor = tf.make_ndarray(value.tensor) if kind != "hparams" else value.metadata
                values[f"{kind} {value.tag}", event.step] = tensor
    return values, graphs


class Weights(Callback):
    """Keeps the kernel after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[np.ndarray] = []

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.kernels.append(self.model.layers[0].kernel.numpy())


def histograms(folder: Path, **backend: Any) -> None:
    logging = {"progress": "none", "csv": False, "tensorboard": True, "histograms": "2ba"}
    with_ktrainer(ZOO["mlp"], logging=logging, run={"dir": str(folder)}, backend=backend)


def test_histograms_graph_and_settings(tmp_path: Path) -> None:
    kept = Weights()
    words = ["logging.histograms=2ba", "logging.tensorboard=true", "logging.every=3ba"]
    quiet = ["logging.progress=none", "data.batch_size=4", f"run.dir={tmp_path}"]
    with Trainer(overrides=[*quiet, *words], callbacks=[kept]) as trainer:
        trainer.fit(lambda: build(eager=False), data())
    values, (graph,) = written(tmp_path / "tensorboard")
    name = trainer.model.layers[0].kernel.path
    assert {step for tag, step in values if tag == f"histograms weight/{name}"} == {2, 4, 6}
    for step in (2, 4, 6):
        table, kernel = values[f"histograms weight/{name}", step], kept.kernels[step - 1]
        assert table.shape == (30, 3)
        np.testing.assert_allclose([table[0, 0], table[-1, 1]], [kernel.min(), kernel.max()])
        counts, _ = np.histogram(kernel, np.append(table[:, 0], table[-1, 1]))
        assert np.abs(counts - table[:, 2]).sum() <= 2  # on an edge
        assert values[f"histograms gradient/{name}", step][:, 2].sum() == kernel.size
    assert "MatMul" in {node.op for node in graph.node}
    assert any(tag.startswith("hparams") for tag, _ in values)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["data_parallel", "pipeline"])
def test_histograms_of_ranks_are_those_of_one_process(
    ranks: Callable[..., Any], tmp_path: Path, backend: str
) -> None:
    """A pipeline's rank 0 writes those of all stages."""
    keras.utils.clear_session()
    histograms(tmp_path / "one", name="local")
    more = {"partitions": 2, "microbatches": 2} if backend == "pipeline" else {"engine": "mpi"}
    ranks(2).run(histograms, tmp_path / "two", name=backend, **more)
    truth, _ = written(tmp_path / "one" / "tensorboard")
    ours, _ = written(tmp_path / "two" / "tensorboard")
    tables = {key for key in truth if key[0].startswith("histograms")}
    assert tables == {key for key in ours if key[0].startswith("histograms")}
    assert len(tables) >= 2 * 4 * 3
    for key in tables:
        np.testing.assert_allclose(ours[key][:, :2], truth[key][:, :2], rtol=1e-3, atol=1e-6)
        assert np.abs(ours[key][:, 2] - truth[key][:, 2]).sum() <= 4


def test_images(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3)).astype("uint8")
    board = TensorBoardLog(tmp_path)
    board.set_model(build())
    board.on_train_begin()
    board.image("samples", pictures, step=3)
    board.image("gray", pictures[..., :1] / np.float32(255), step=4)
    board.close()
    values, _ = written(tmp_path)
    width, height, *encoded = values["images samples", 3]
    assert (width, height) == (b"7", b"5")
    for picture, png in zip(pictures, encoded, strict=True):
        np.testing.assert_array_equal(tf.io.decode_png(png), picture)
    np.testing.assert_array_equal(
        tf.io.decode_png(values["images gray", 4][2]), pictures[0, ..., :1]
    )


class EarlyImage(Callback):
    """Writes an image before each epoch, first of all callbacks."""

    def __init__(self, board: TensorBoardLog) -> None:
        super().__init__()
        self.board = board

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self.board.image("early", np.zeros((1, 2, 2, 1)))


def test_images_from_before_the_first_epoch(tmp_path: Path) -> None:
    """They are not dropped with what an earlier start has left, nor is what follows."""
    for _ in range(2):
        board = TensorBoardLog()
        quiet = ["logging.progress=none", "data.batch_size=4", f"run.dir={tmp_path}"]
        words = ["logging.every=2ba", "trainer.epochs=2", "checkpoint.every=null"]
        with Trainer(overrides=[*quiet, *words], callbacks=[EarlyImage(board), board]) as trainer:
            trainer.fit(build, data())
        values, _ = written(tmp_path / "tensorboard")
        assert {step for tag, step in values if tag == "images early"} == {0, 6}
        steps = [step for tag, step in values if tag == "scalars loss"]
        assert steps == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["logging.histograms=5ba"], "has no effect without logging.tensorboard"),
        (["trainer.xla=true"], "XLA cannot compile"),
        (["trainer.steps_per_call=3"], "needs an update of its own call"),
    ],
)
def test_histograms_that_cannot_be_had(words: list[str], why: str) -> None:
    more = [] if "histograms" in words[0] else ["logging.tensorboard=true"]
    with pytest.raises(ConfigError, match=rf"logging\.histograms: {why}"):
        load_config(None, ["logging.histograms=5ba", *more, *words])


WRITES = """
from ktrainer import Trainer
from ktrainer.callbacks import TensorBoardLog
from tests.small import build, data

with Trainer.from_cli([TensorBoardLog("logs")]) as trainer:
    trainer.fit(build, data())
"""


@pytest.mark.exhaustive
def test_two_processes_that_write_to_one_folder(tmp_path: Path) -> None:
    """The second one says so; after the first has ended, nobody does."""
    said, path = [], tmp_path / "writes.py"
    path.write_text(WRITES)

    class Other(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            said.append(script(path, "logging.progress=none", cwd=tmp_path).stderr)

    words = ["logging.progress=none", "logging.every=1ba", f"run.dir={tmp_path / 'run'}"]
    with Trainer(overrides=words, callbacks=[TensorBoardLog(tmp_path / "logs"), Other()]) as it:
        it.fit(build, data())
    said.append(script(path, "logging.progress=none", cwd=tmp_path).stderr)
    during, after = said
    warning = "another process writes to the TensorBoard folder logs, too"
    assert during.count(warning) == 1
    assert warning not in after
    assert list((tmp_path / "logs").glob(".lock")) == []
