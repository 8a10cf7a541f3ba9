"""When checkpoints are saved."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ktrainer.checkpoint.format.checkpoint_folder as format_module
from ktrainer import distributed
from ktrainer.callbacks import Callback, Checkpoint
from ktrainer.checkpoint import read_checkpoint, resume
from ktrainer.checkpoint.best_metric import metric_direction
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError, ConfigError
from tests.callbacks.helpers import fit, small_model
from tests.small import build, data, trainer
from tests.small import fit as small_fit


def steps(directory: Path) -> list[int]:
    return sorted(entry.step for entry in Store(directory).entries())


@pytest.mark.parametrize(
    ("every", "epochs", "expected"),
    [("1ep", 3, [5, 10, 15]), ("2ep", 5, [10, 20]), ("4ba", 3, [4, 8, 12]), ("0.4ep", 1, [2, 4])],
)
def test_a_checkpoint_at_each_interval(
    tmp_path, every: str, epochs: int, expected: list[int]
) -> None:
    fit(small_model(), [Checkpoint(tmp_path, every=every, keep=10)], epochs=epochs)
    assert steps(tmp_path) == expected


def test_a_checkpoint_at_each_interval_of_time(tmp_path) -> None:
    class Slow(Callback):
        def on_step_begin(self, step: int) -> None:
            import time

            time.sleep(0.12)

    fit(small_model(), [Slow(), Checkpoint(tmp_path, every="0.3s", keep=10)], epochs=2)
    saved = [read_checkpoint(entry.path)[1]["progress"] for entry in Store(tmp_path).entries()]
    times = sorted(progress["elapsed"] for progress in saved)
    assert len(times) >= 2
    assert all(b - a >= 0.3 for a, b in itertools.pairwise(times))


def test_a_checkpoint_inside_an_epoch_has_its_position(tmp_path) -> None:
    fit(small_model(), [Checkpoint(tmp_path, every="3ba", keep=10)], epochs=2)
    entries = {e.step: e for e in Store(tmp_path).entries()}
    arrays, state = read_checkpoint(entries[3].path)
    assert (state["progress"]["epoch"], state["progress"]["batch"]) == (0, 3)
    assert "metrics/0/0:total@0" in arrays
    _, state = read_checkpoint(entries[6].path)
    assert (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 1)
    assert state["history"]["epoch"] == [0]


class Scores(keras.callbacks.Callback):
    """Puts a score of our choice into the logs of each epoch."""

    def __init__(self, *scores: float | None) -> None:
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.scores[epoch] is not None:
            logs["score"] = self.scores[epoch]


def test_only_the_best_is_saved(tmp_path) -> None:
    scores = Scores(1.0, 3.0, 2.0, float("nan"), 4.0, 0.0)
    checkpoint = Checkpoint(tmp_path, best="score", mode="max", keep=2)
    fit(small_model(), [scores, checkpoint], epochs=6)
    assert steps(tmp_path) == [10, 25]
    best = Store(tmp_path).best("score", "max")
    assert best is not None
    assert best.metric == ("score", 4.0)
    assert checkpoint.state_dict()["best_value"] == 4.0


def test_a_best_that_was_not_saved_is_none(tmp_path) -> None:
    class Spoils(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["loss"] = float("nan") if epoch == 1 else 1.0

    keeper = Checkpoint(tmp_path, best="score", mode="max")
    with pytest.warns(UserWarning, match="not finite: no checkpoint"):
        fit(small_model(), [Scores(1.0, 3.0, 2.0), Spoils(), keeper], epochs=3)
    assert steps(tmp_path) == [5, 15]


def test_best_inside_an_epoch(tmp_path) -> None:
    """The best at an epoch's last update is saved once more at the epoch's end, and stays best."""

    class Judges(Callback):
        def on_validation_end(self, step: int, logs: Any) -> None:
            logs["val_loss"] = 0.1 if step == 6 else 1.0

    words = {"checkpoint__every": "1ep", "checkpoint__best": "val_loss", "trainer__epochs": 4}
    words |= {"run__dir": tmp_path, "trainer__validate_every": "0.5ep"}
    with trainer([Judges()], **words) as it:
        it.fit(build, data(), validation_data=data(8))
    assert steps(tmp_path / "checkpoints") == [6, 18, 24]
    best = Store(tmp_path / "checkpoints").best("val_loss", "min")
    assert best is not None
    assert (best.step, best.metric) == (6, ("val_loss", 0.1))


def test_best_and_last(tmp_path) -> None:
    scores = Scores(3.0, 1.0, 2.0, 2.0, 2.0)
    fit(
        small_model(),
        [scores, Checkpoint(tmp_path, every="1ep", best="score", mode="min", keep=2)],
        epochs=5,
    )
    assert steps(tmp_path) == [10, 20, 25]


def test_a_fresh_run_in_an_old_folder_keeps_its_own_best(tmp_path) -> None:
    def run(*scores: float, rows: int = 50) -> None:
        keeper = Checkpoint(tmp_path, every="1ep", best="score", mode="min", keep=2)
        fit(small_model(), [Scores(*scores), keeper], epochs=len(scores), rows=rows)

    run(0.1, 0.2, 0.3)
    assert steps(tmp_path) == [5, 10, 15]
    run(2.0, 1.0, 4.0, 5.0, 6.0)
    assert steps(tmp_path) == [5, 10, 20, 25]  # the best of before, its own best, and the last two
    best = Store(tmp_path).best("score", "min")
    assert best is not None
    assert (best.path.name, best.metric) == ("step-00000005-2", ("score", 0.1))


def test_a_run_that_went_back_keeps_its_best(tmp_path) -> None:
    """Beside a better one that it saved before it went back."""

    class GoesBack(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            older = str(tmp_path / "step-00000005")
            resume(older, tmp_path, model=self.model, world=SingleWorld(), callbacks=[keeper])

    def made(keep: int) -> Checkpoint:
        return Checkpoint(tmp_path, every="1ep", best="score", mode="min", keep=keep)

    fit(small_model(), [Scores(5.0, 4.0, 4.0, 4.0, 0.1), made(9)], epochs=5)
    keeper = made(2)
    again = [Scores(5.0, 3.0, 6.0, 6.0), keeper, GoesBack()]
    fit(small_model(), again, epochs=4, initial_epoch=1)
    assert steps(tmp_path) == [10, 15, 20, 25]
    assert keeper.best_value == 3.0


def test_a_monitor_that_is_not_there(tmp_path) -> None:
    with pytest.warns(UserWarning, match="'acuracy' is not in the logs.*loss, mae"):
        fit(small_model(), [Checkpoint(tmp_path, best="acuracy", mode="max")])
    with pytest.raises(ConfigError, match=r"checkpoint\.mode"):
        fit(small_model(), [Scores(1.0), Checkpoint(tmp_path, best="score")])


def test_a_metric_of_unknown_direction_is_refused_after_the_first_update(tmp_path) -> None:
    def closeness(y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.abs(y_true - y_pred)

    class Counts(Callback):
        def on_step_begin(self, step: int) -> None:
            begun.append(step)

    begun: list[int] = []
    model = small_model()
    model.compile("sgd", "mse", metrics=[closeness])
    with pytest.raises(ConfigError, match=r"'closeness' is better; set checkpoint\.mode"):
        fit(model, [Counts(), Checkpoint(tmp_path, best="closeness", every="1ep")])
    assert len(begun) == 1


def test_an_epoch_without_validation_has_no_metric_of_it(tmp_path) -> None:
    words = {"run__dir": tmp_path, "trainer__epochs": 4, "trainer__validate_every": "2ep"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        small_fit(validation=data(), checkpoint__best="val_loss", **words)
    with pytest.warns(UserWarning, match="'val_los' is not in the logs") as said:
        small_fit(validation=data(), checkpoint__best="val_los", checkpoint__mode="min", **words)
    assert sum("val_los" in str(each.message) for each in said) == 2


def test_a_metric_of_validation_that_never_came(tmp_path) -> None:
    def warned(**settings: Any) -> list[str]:
        words = {"run__dir": tmp_path, "checkpoint__mode": "min", **settings}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            small_fit(validation=data(), **words)
        return [text for each in said if "checkpoint.best" in (text := str(each.message))]

    inside = {"trainer__validate_every": "4ba", "trainer__epochs": 1}
    (said,) = warned(checkpoint__best="val_los", **inside)
    assert "'val_los' is not in the logs" in said
    assert warned(checkpoint__best="val_loss", **inside) == []
    late = {"trainer__validate_every": "4ep", "trainer__epochs": 2}
    (said,) = warned(checkpoint__best="val_loss", **late)
    assert "'val_loss' was in no logs" in said


def test_direction() -> None:
    model = small_model()
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "mae"])
    x, y = np.zeros((4, 4), "float32"), np.float32([[0], [1], [0], [1]])
    model.fit(x, y, verbose=0)
    assert metric_direction(model, "val_auc") == "max"
    assert metric_direction(model, "mae") == "min"
    assert metric_direction(model, "val_loss") == metric_direction(model, "a_loss") == "min"


def test_a_loss_that_is_not_finite_is_not_kept(tmp_path) -> None:
    class Spoils(Callback):
        def on_step_begin(self, step: int) -> None:
            if step == 7:
                weight = self.model.trainable_weights[0]
                weight.assign(weight * float("nan"))

    with pytest.warns(UserWarning, match="not finite: no checkpoint"):
        fit(small_model(), [Spoils(), Checkpoint(tmp_path, every="2ba", keep=9)], epochs=2)
    assert steps(tmp_path) == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("nan", "steps"), [("ignore", [6, 12]), ("stop", [])])
def test_what_health_nan_says_of_saving(tmp_path, nan: str, steps: list[int]) -> None:
    x, y = data()
    x[0] = np.nan
    words = {"run__dir": tmp_path, "checkpoint__every": "1ep", "trainer__epochs": 2}
    with trainer(**words, health__nan=nan) as it:
        it.fit(build, (x, y))
    assert [entry.step for entry in Store(tmp_path / "checkpoints").entries()][::-1] == steps


def test_settings_are_checked(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every"):
        Checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep"):
        Checkpoint(tmp_path, every="1ep", keep=1)
    with pytest.raises(ConfigError, match=r"checkpoint\.mode: 'maxx' .*'max'"):
        Checkpoint(tmp_path, best="x", mode="maxx")
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        fit(small_model(), [Checkpoint(every="1ep")])


def _save_on_ranks(directory: str) -> list[int]:
    model = small_model()
    callback = Checkpoint(directory, every="3ba", keep=2)
    fit(model, [callback], epochs=2)
    return steps(Path(directory))


def test_rank_zero_writes_and_the_metrics_of_all_are_kept(ranks, tmp_path) -> None:
    assert ranks(2).run(_save_on_ranks, str(tmp_path)) == [[6, 9]] * 2
    arrays, state = read_checkpoint(tmp_path / "step-00000009")
    assert state["world_size"] == 2
    assert {"metrics/0/0:total@0", "metrics/0/0:total@1"} <= set(arrays)


def _cannot_write(directory: str) -> None:
    if distributed.current_world().is_root:

        def full(at: str, path: Path) -> None:
            raise OSError(28, "No space left on device")

        format_module.fault_point = full
    try:
        fit(small_model(), [Checkpoint(directory, every="3ba")])
    finally:
        format_module.fault_point = lambda at, path: None


def test_when_rank_zero_cannot_write_all_end(ranks, tmp_path) -> None:
    for outcome in ranks(2).outcomes(_cannot_write, str(tmp_path)):
        assert isinstance(outcome.error, CheckpointError)
        assert "No space left" in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


def test_the_best_is_known_before_an_epoch_is_judged(tmp_path) -> None:
    """After a resume, saves inside the first epoch must not take a high accuracy for a bad one."""

    class Score(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_accuracy"] = [1.0, 0.9][epoch]

    def run(every: str, epochs: int) -> None:
        keeper = Checkpoint(tmp_path, every=every, keep=2, best="val_accuracy")
        fit(small_model(metrics=["accuracy"]), [Score(), keeper], epochs=epochs)

    run("1ep", 2)
    assert steps(tmp_path) == [5, 10]
    with pytest.raises(KeyboardInterrupt):
        run_until_step_2(tmp_path)
    assert steps(tmp_path) == [2, 5, 10]


def run_until_step_2(directory: Path) -> None:
    class Killed(Callback):
        def on_step_begin(self, step: int) -> None:
            if step == 2:
                raise KeyboardInterrupt

    keeper = Checkpoint(directory, every="2ba", keep=2, best="val_accuracy")
    try:
        fit(small_model(metrics=["accuracy"]), [Killed(), keeper])
    finally:
        keeper.close()  # what Keras' own fit does not do
