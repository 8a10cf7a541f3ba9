"""Events, counters and who runs what."""

from __future__ import annotations

import subprocess
import sys

import keras
import pytest

import ktrainer.callbacks as callbacks
from ktrainer.callbacks import Callback, emit, gradient_hooks, is_writer, on_rank, rank_zero_only
from ktrainer.distributed import SingleWorld
from ktrainer.verify.update_recorder import recorded_callbacks
from ktrainer.verify.verify_mode import VerifyRun
from tests.callbacks.helpers import fit, small_model


class Records(Callback):
    """Writes down every step event with the counters of that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple] = []

    def on_step_begin(self, step):
        self.events.append(("begin", step, self.progress.epoch, self.progress.batch))

    def on_step_end(self, step, logs=None):
        assert "loss" in logs
        self.events.append(("end", step, self.progress.epoch, self.progress.batch))


def test_keras_gives_steps() -> None:
    seen = Records()
    fit(small_model(), [seen], epochs=2, rows=20)
    assert seen.events == [
        ("begin", 0, 0, 0),
        ("end", 1, 0, 1),
        ("begin", 1, 0, 1),
        ("end", 2, 0, 2),
        ("begin", 2, 1, 0),
        ("end", 3, 1, 1),
        ("begin", 3, 1, 1),
        ("end", 4, 1, 2),
    ]
    assert (seen.progress.epoch, seen.progress.step) == (2, 4)
    assert seen.progress.elapsed > 0


def test_steps_after_an_initial_epoch() -> None:
    seen = Records()
    fit(small_model(), [seen], epochs=4, rows=20, initial_epoch=3)
    assert [e[1] for e in seen.events] == [6, 7, 7, 8]


def test_several_steps_a_call() -> None:
    seen = Records()
    fit(small_model(steps_per_execution=2), [seen], rows=50)
    assert [e[1] for e in seen.events if e[0] == "end"] == [2, 4, 5]


def test_every_name_can_be_imported_and_none_before() -> None:
    for name in callbacks.__all__:
        assert getattr(callbacks, name) is not None
    assert set(callbacks.__all__) <= set(dir(callbacks))
    with pytest.raises(AttributeError, match="Earlystopping"):
        _ = callbacks.Earlystopping
    code = "import sys, ktrainer.callbacks, ktrainer.checkpoint; "
    code += "sys.exit(bool({'keras', 'tensorflow', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writers_stay_on_rank_zero(tmp_path) -> None:
    class Screen(Callback):
        rank_zero_only = True

    class Mine(keras.callbacks.CSVLogger):
        pass

    writers = [
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
        Mine(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path),
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
    ]
    others = [keras.callbacks.EarlyStopping(), Records(), keras.callbacks.LambdaCallback()]
    assert all(is_writer(writer) for writer in writers)
    assert not any(is_writer(other) for other in others)
    every = [*writers, Screen(), *others]
    assert on_rank(every, 0) == every
    assert on_rank(every, 1) == others
    writers[0].on_every_rank = True
    assert on_rank(every, 1) == [writers[0], *others]
    recorded = recorded_callbacks(every, VerifyRun("unsplit", str(tmp_path), 2), remote=False)
    assert recorded[:-1] == others  # `ktrainer verify` leaves no files


def test_emit_calls_only_what_is_overridden() -> None:
    seen = Records()
    emit([keras.callbacks.EarlyStopping(), Callback(), seen], "on_step_begin", 7)
    assert seen.events == [("begin", 7, 0, 0)]
    assert gradient_hooks([seen, Callback()]) == []

    class Doubles(Callback):
        def on_gradients(self, gradients, variables):
            return [2 * g for g in gradients]

    (hook,) = gradient_hooks([seen, Doubles()])
    assert hook([1.0], [None]) == [2.0]


def test_without_trainer_the_world_is_this_process() -> None:
    callback = Callback()
    assert callback.world.size == 1
    assert callback.run_dir is None
    callback._own_world = world = SingleWorld()
    assert callback.world is world
    callback.set_model(small_model())
    callback.request_stop("enough")
    assert callback.model.stop_training


def _only_root() -> list[str | None]:
    @rank_zero_only
    def name(text: str) -> str:
        return text

    return [name("written"), name.__name__]


def test_rank_zero_only(ranks) -> None:
    assert ranks(2).run(_only_root) == [["written", "name"], [None, "name"]]
