"""Resume of `fit`: after a crash, with more time, and in its second call."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Callback, Trainer
from ktrainer.checkpoint.contents.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.contents.plain_attributes import note_attributes
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.errors import CheckpointError
from tests import small

ROWS, BATCH = 40, 4  # ten batches an epoch, or five updates of two


def settings(directory: Path, **more: Any) -> list[str]:
    words = {
        "run.dir": directory,
        "data.batch_size": BATCH,
        "trainer.epochs": 3,
        "trainer.accumulate": 2,
        "checkpoint.every": "1ba",
        "logging.progress": "none",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in words.items()]


def model() -> keras.Model:
    """Everything that has a state: dropout, moving statistics, slots, a schedule, metrics."""
    it = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=4),
            layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    it.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return it


def plain() -> keras.Model:
    """A small model, compiled: for many steps that takes less time than running eagerly."""
    return small.build(eager=False)


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 6)).astype("float32"), random.integers(0, 3, ROWS)


def train(
    words: list[str], callbacks: Callable[[], list[Any]] = list, build: Any = model
) -> tuple[dict[str, list[float]], list[bytes], int]:
    """History, the bits of all variables, and the step, after a `fit` as in a new process."""
    keras.utils.clear_session()
    with Trainer(overrides=words, callbacks=callbacks()) as trainer:
        history = trainer.fit(build, data(), validation_data=data()).history
        variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
        return history, [v.numpy().tobytes() for v in variables], trainer.progress.step


def in_parts(directory: str, backend: str, *ends: int) -> list[Any]:
    """A run without interruption, and one that was stopped after each of `ends` updates."""
    whole = train(settings(Path(directory) / "whole", backend=backend))
    for end in ends:
        train(settings(Path(directory) / "parts", backend=backend, trainer__max_steps=end))
    return [whole, train(settings(Path(directory) / "parts", backend=backend))]


@pytest.mark.exhaustive
def test_a_run_in_parts_is_the_whole_run_to_the_bit(tmp_path: Path) -> None:
    whole, parts = in_parts(str(tmp_path), "local", 2, 10)
    assert parts == whole
    assert whole[2] == 15


def test_ranks_resume_to_the_bit(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    for whole, parts in ranks(2).run(in_parts, str(tmp_path), "data_parallel", 8, deadline=120):
        assert parts == whole
        assert whole[2] == 15


def test_the_home_folder_in_the_names_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"checkpoint__every": "1ep", "health__verify": "off", "trainer__accumulate": 1}
    kept = settings(Path("~/runs"), checkpoint__dir="~/kept", trainer__epochs=1, **short)
    words = settings(Path("~/new"), checkpoint__resume="~/kept", trainer__epochs=2, **short)
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        patch.chdir(tmp_path)
        train(kept, build=small.build)
        assert {path.name for path in tmp_path.iterdir()} == {"runs", "kept"}
        resumed = train(words, build=small.build)
        whole = train([*kept, "trainer.epochs=2"], build=small.build)
    assert whole[2] == 20
    assert resumed == whole


class Fails(keras.callbacks.Callback):
    """Fails as an epoch begins, or at a batch of it."""

    def __init__(self, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self.at, self.batch, self.epoch = epoch, batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if (epoch, self.batch) == (self.at, None):
            raise InterruptedError

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (self.at, self.batch):
            raise InterruptedError


class StepLogger(keras.callbacks.CSVLogger):
    """Its first column is no epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(1000 * (epoch + 1), logs)


@pytest.mark.parametrize(
    ("append", "kind"), [(False, keras.callbacks.CSVLogger), (True, StepLogger)]
)
def test_a_resumed_csv_log_is_that_of_one_run(tmp_path: Path, append: bool, kind: Any) -> None:
    """An older file is kept or not, as under Keras; rows after the checkpoint are not doubled."""

    def run(name: str, *others: Any) -> bytes:
        log = kind(tmp_path / name, append=append)
        more = {"trainer__epochs": 5, "trainer__validate_every": "2ep"}
        words = settings(tmp_path / f"run of {name}", checkpoint__every="3ba", **more)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)  # is in the logs
        with pytest.raises(InterruptedError) if others else nullcontext():
            train(words, lambda: [rate, log, *others], plain_rate)
        log.csv_file.close()  # which Keras leaves open where the run fails
        assert log.append is append
        return (tmp_path / name).read_bytes()

    for name in ("whole", "first", "second", "fourth"):
        (tmp_path / name).write_text("epoch,of another run\n0,1\n1,2\n2,3\n3,4\n")
    whole = run("whole")
    assert len(whole.splitlines()) == (10 if append else 6)
    assert whole.startswith(run("fourth", Fails(3)))  # after three rows, of which one is repeated
    assert run("fourth") == whole
    run("second", Fails(2))  # of which one is cut: the next row has logs of the validation
    assert run("second") == whole
    run("first", Fails(0, 3))  # after a checkpoint in the first epoch
    assert run("first") == whole


@pytest.mark.parametrize(("append", "every"), [(False, "2ep"), (True, "1ep")])
def test_two_fits_resume_with_one_csv_log(tmp_path: Path, append: bool, every: str) -> None:
    """The first one, which is resumed before, leaves the rows of the second one."""

    def script(name: str, *others: Any) -> bytes:
        keras.utils.clear_session()
        log = keras.callbacks.CSVLogger(tmp_path / f"{name}.csv", append=append)
        words = settings(tmp_path / name, checkpoint__every=every)
        fails = pytest.raises(InterruptedError) if others else nullcontext()
        with fails, Trainer(overrides=words) as trainer:
            it = plain()
            for more in ([], others):
                trainer.fit(it, data(), callbacks=[log, *more])
        log.csv_file.close()
        return (tmp_path / f"{name}.csv").read_bytes()

    whole = script("whole")
    assert len(whole.splitlines()) == (7 if append else 4)
    script("parts", Fails(2, 4))
    assert script("parts") == whole


def test_a_csv_log_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = keras.callbacks.CSVLogger(tmp_path / "pipe")
    train(settings(tmp_path / "run"), lambda: [log], plain)
    assert len(os.read(reader, 10000).splitlines()) == 4
    os.close(reader)


class EndsSecond(keras.callbacks.Callback):
    """Asks the run to end as its second epoch begins, before the first update of that."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            signal.raise_signal(signal.SIGTERM)


def test_an_epoch_that_had_begun_without_an_update_begins_once(tmp_path: Path) -> None:
    """Its learning rate and weights were changed before the checkpoint."""
    words = {"checkpoint__every": "100ba", "trainer__accumulate": 1}
    whole = train(settings(tmp_path / "whole", **words), at_the_begin, plain_rate)
    parts = settings(tmp_path / "parts", **words)
    with pytest.raises(SystemExit):
        train(parts, lambda: [*at_the_begin(), EndsSecond()], plain_rate)
    assert train(parts, at_the_begin, plain_rate) == whole


def test_a_signal_keeps_the_backup_of_keras_and_other_ends_remove_it(tmp_path: Path) -> None:
    """A run that was asked to end continues from it."""
    folder, backups = tmp_path / "backup", list[Any]()

    def run(*others: Any, **more: Any) -> int:
        words = settings(tmp_path, checkpoint__every="null", trainer__accumulate=1, **more)
        backups.append(keras.callbacks.BackupAndRestore(folder))
        history, _, _ = train(words, lambda: [backups[-1], *others], plain)
        return len(history["loss"])

    with pytest.raises(SystemExit):
        run(EndsSecond())
    assert {path.name for path in folder.iterdir()} >= {"latest.weights.h5"}
    assert backups[0].delete_checkpoint
    assert run() == 2  # of three epochs
    assert not folder.exists()
    assert run(trainer__max_time="0.001s") == 1
    assert not folder.exists()


def test_a_backup_of_keras_that_is_newer_than_the_checkpoint_skips_nothing(tmp_path: Path) -> None:
    """As after a crash, or a signal that leaves no time to save."""

    def run(name: str, *others: Any) -> Any:
        backup = keras.callbacks.BackupAndRestore(tmp_path / name / "backup")
        more = {"checkpoint__every": "2ep", "trainer__epochs": 5, "trainer__accumulate": 1}
        return train(settings(tmp_path / name, **more), lambda: [backup, *others], plain)

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("parts", Fails(3))  # one epoch after the checkpoint
    assert (tmp_path / "parts" / "backup").exists()
    assert run("parts") == whole


def _shuffled(directory: str, backend: str) -> list[Any]:
    """A run without interruption, and one that was stopped in its second and third epoch."""

    def pipeline(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1)
        return rows.shuffle(5, seed=2).batch(BATCH)

    def fit(name: str, **more: Any) -> Any:
        keras.utils.clear_session()
        words = settings(Path(directory) / name, backend=backend, **more)
        with Trainer(overrides=words) as trainer:
            train, validation = pipeline(*data()), pipeline(*data())
            given = {"validation_data": validation, "validation_steps": 3}
            return trainer.fit(plain_rate, train, **given).history

    whole = fit("whole", trainer__epochs=4)
    for steps in (5, 13):  # the end of the first epoch, and inside of the third
        fit("parts", trainer__epochs=4, trainer__max_steps=steps, checkpoint__iterators="false")
    return [whole, fit("parts", trainer__epochs=4, checkpoint__iterators="false")]


def test_shuffles_below_others_and_those_of_validation_resume(
    tmp_path: Path, ranks: Callable[..., Any]
) -> None:
    """Each validation reads other batches, and each epoch both shuffles' next orders."""
    several = ranks(2).run(_shuffled, str(tmp_path / "ranks"), "data_parallel", deadline=120)
    for whole, parts in [_shuffled(str(tmp_path), "local"), *several]:
        assert parts == whole


class Counts(Callback):
    """A user's own: multiplies the rate by 0.9 at the end of every second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.ends += 1
        if self.ends % 2 == 0:
            optimizer = self.model.optimizer
            optimizer.learning_rate = float(optimizer.learning_rate) * 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ends = state["ends"]


def plain_rate() -> keras.Model:
    """The model with a rate that callbacks can change."""
    it = model()
    it.compile(keras.optimizers.SGD(0.05, momentum=0.9), it.loss, metrics=["accuracy"])
    return it


def plateau() -> list[Any]:
    # Nothing is ever this much better: each epoch after the first one counts.
    settings = {"monitor": "loss", "patience": 2, "min_delta": 100.0}
    return [keras.callbacks.ReduceLROnPlateau(**settings, factor=0.5), Counts()]


def early_stop() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(
            "loss", patience=3, min_delta=100.0, restore_best_weights=True, start_from_epoch=1
        )
    ]


class Shrinks(keras.callbacks.Callback):
    """A user's own: takes a tenth off the weights at the begin of each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for weight in self.model.trainable_variables:
            weight.assign(0.9 * weight)


def at_the_begin() -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate), Shrinks()]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("callbacks", "best"), [(plateau, "loss"), (early_stop, None), (at_the_begin, None)]
)
def test_an_epoch_that_was_cut_counts_once(
    tmp_path: Path, callbacks: Callable[[], list[Any]], best: str | None
) -> None:
    more = {"checkpoint__every": "1ep", "trainer__epochs": 6, "trainer__accumulate": 1}
    more |= {"checkpoint__best": best} if best else {}

    def run(name: str, **limits: Any) -> Any:
        words = settings(tmp_path / name, **more, **limits)
        return train(words, callbacks, build=plain_rate)

    for end in (14, 28):  # in the second epoch, and in the third
        run("parts", trainer__max_steps=end)
    assert run("parts") == run("whole")


def test_rates_of_a_table_are_scaled_in_a_run_in_parts_too(tmp_path: Path) -> None:
    """Inside an epoch, and where one begins."""
    table = [0.05, 0.02, 0.04]
    more = {"trainer__accumulate": 1, "lr__schedule": "[{start: 0ep, multiplier: 4.0}]"}

    def run(name: str, **limits: Any) -> Any:
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: table[epoch])
        return train(settings(tmp_path / name, **more, **limits), lambda: [scheduler], plain_rate)

    whole = run("whole")
    np.testing.assert_allclose(whole[0]["learning_rate"], 4 * np.array(table), rtol=1e-6)
    for end in (4, 10, 13):
        run("parts", trainer__max_steps=end)
    assert run("parts") == whole


class CallsOff(keras.callbacks.Callback):
    """Stops inside the second epoch, and thinks better of it."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 13:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = False


def test_a_checkpoint_after_a_stop_that_was_called_off_is_of_its_own_moment(tmp_path: Path) -> None:
    def run(name: str, **limits: Any) -> Any:
        words = settings(tmp_path / name, trainer__accumulate=1, **limits)
        return train(words, lambda: [CallsOff()], plain_rate)

    run("parts", trainer__max_steps=16)
    assert Store(tmp_path / "parts" / "checkpoints").entries()[0].step == 16
    assert run("parts") == run("whole")


def test_an_iterator_that_has_run_out_is_not_read_again(tmp_path: Path) -> None:
    """A restarted script makes it anew."""

    def run() -> tuple[int, dict[str, list[float]]]:
        x, y = data()
        batches = ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH))
        words = settings(tmp_path, trainer__accumulate=1, checkpoint__every="1ep")
        keras.utils.clear_session()
        with Trainer(overrides=words) as trainer:
            history = trainer.fit(plain_rate, batches).history
            return trainer.progress.step, history

    first = run()
    assert first[0] == -(-len(data()[0]) // BATCH)
    with pytest.warns(UserWarning, match="its iterator had been read to the end"):
        assert run() == first


def test_the_end_of_an_epoch_that_a_stop_has_cut_is_not_lost(tmp_path: Path) -> None:
    """As where a process is killed after the checkpoint of the last update."""

    def run(name: str, **limits: Any) -> Any:
        words = settings(tmp_path / name, trainer__accumulate=1, checkpoint__keep=99, **limits)
        return train(words, lambda: [CallsOff(), *plateau()], plain_rate)

    whole = run("whole")
    saved = Store(tmp_path / "whole" / "checkpoints").entries()
    (stopped,) = [entry.path for entry in saved if entry.step == 13]
    with pytest.warns(UserWarning, match="training had been stopped"):
        assert run("parts", checkpoint__resume=stopped) == whole


class StopsAtBegin(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.stop_training = True


def test_a_stop_as_training_begins_comes_after_one_update_of_a_resume(tmp_path: Path) -> None:
    words = settings(tmp_path / "run", trainer__accumulate=1)
    train([*words, "trainer.max_steps=14"])
    assert train([*words, "trainer.max_time=1h"], lambda: [StopsAtBegin()])[2] == 15


def test_a_run_that_was_out_of_time_resumes_with_more(tmp_path: Path) -> None:
    words = settings(tmp_path / "run", trainer__accumulate=1)
    _, _, step = train([*words, "trainer.max_time=0.01s"])
    assert step < 30
    history, _, step = train([*words, "trainer.max_time=1h"])
    assert step == 30
    assert len(history["loss"]) == 3


def test_time_that_is_used_up_stays_used_up(tmp_path: Path) -> None:
    words = settings(tmp_path / "run", trainer__accumulate=1)
    _, _, step = train([*words, "trainer.max_time=0.01s"])
    with pytest.warns(UserWarning, match="max_time, so no update is made"):
        assert train([*words, "trainer.max_time=0.01s"])[2] == step


def test_a_stopped_run_says_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    words = settings(tmp_path / "run", checkpoint__every="1ep")
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
    with Trainer(overrides=words, callbacks=[stop]) as trainer:
        trainer.fit(model, data())
    keras.utils.clear_session()
    with Trainer(overrides=words) as trainer, pytest.warns(UserWarning, match="resume=never"):
        trainer.fit(model, data())


def test_each_fit_of_a_script_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    def script() -> list[tuple[int, list[float]]]:
        keras.utils.clear_session()
        with Trainer(overrides=settings(tmp_path / "run")) as trainer:
            it, parts = model(), []
            for _ in range(2):
                history = trainer.fit(it, data()).history
                parts.append((trainer.progress.step, history["loss"]))
            return parts

    first = script()
    assert [step for step, _ in first] == [15, 15]
    assert first[0][1] != first[1][1], "the second fit trains on"
    assert {"checkpoints", "checkpoints-2"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert script() == first, "both are restored, each from its own"


@pytest.mark.parametrize(("every", "steps"), [("1ba", None), ("1ep", 3)])
def test_two_fits_on_one_shuffled_pipeline(tmp_path: Path, every: str, steps: int | None) -> None:
    """The second one, resumed, has the orders that follow those of the first."""

    def script(name: str, *others: Any) -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        rows = tf.data.Dataset.from_tensor_slices(data()).shuffle(ROWS, seed=1)
        pipeline = rows.shuffle(5, seed=2).batch(BATCH)
        more = {"checkpoint__every": every, "checkpoint__iterators": "false"}
        words = settings(tmp_path / name, trainer__accumulate=1, **more)
        with Trainer(overrides=words) as trainer:
            it = plain()
            trainer.fit(it, pipeline, steps_per_epoch=steps)
            return trainer.fit(it, pipeline, steps_per_epoch=steps, callbacks=others).history

    whole = script("whole")
    with pytest.raises(InterruptedError):
        script("parts", Fails(1, 1))
    assert script("parts") == whole


class FailsInsideEpoch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            raise InterruptedError


def test_a_second_fit_resumes_in_a_script_without_the_first(tmp_path: Path) -> None:
    def fine_tune(name: str, callbacks: Any = (), first: bool = True, **more: Any) -> list[float]:
        keras.utils.clear_session()
        words = settings(tmp_path / name, trainer__epochs=2, **more)
        with Trainer(overrides=words) as trainer:
            it = model()
            if first:
                trainer.fit(it, data())
            return trainer.fit(it, data(), callbacks=callbacks).history["loss"]

    whole = fine_tune("whole")
    with pytest.raises(InterruptedError):
        fine_tune("parts", [FailsInsideEpoch()])
    newest = max((tmp_path / "parts" / "checkpoints-2").iterdir())
    assert fine_tune("alone", first=False, checkpoint__resume=newest) == whole


def phases(folder: Path, *names: str, **more: Any) -> list[float]:
    """The losses of the last phase of a script that trains in phases."""
    keras.utils.clear_session()
    (x, y), epochs = data(), more.pop("trainer__epochs", 2)
    words = settings(folder, checkpoint__every="1ep", trainer__epochs=epochs, **more)
    with Trainer(overrides=words) as trainer:
        for name in names:
            it = small.build()
            it.layers[0].trainable = name != "head"
            it.compile("sgd", it.loss, run_eagerly=True)
            history = trainer.fit(it, (x + (name == "other data"), y)).history
    return history["loss"]


@pytest.mark.parametrize("second", ["other data", "all layers"])
def test_a_call_is_not_resumed_from_one_that_the_script_skips(tmp_path: Path, second: str) -> None:
    whole = phases(tmp_path, "head", second)
    with pytest.raises(CheckpointError, match="what call 2 was before, so the script seems to"):
        phases(tmp_path, second)
    assert phases(tmp_path, "head", second) == whole
    newest = tmp_path / "checkpoints-2"
    assert phases(tmp_path, second, checkpoint__resume=newest) == whole


def test_a_call_with_other_data_resumes_and_says_where_it_trains_nothing(tmp_path: Path) -> None:
    first = phases(tmp_path, "all layers")
    with pytest.warns(UserWarning, match="nothing is trained, because .* differs from it in"):
        assert phases(tmp_path, "other data") == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert phases(tmp_path, "other data", trainer__epochs=3)[:2] == first


def test_a_call_is_not_taken_for_a_later_one_of_which_less_is_known(tmp_path: Path) -> None:
    first = phases(tmp_path, "all layers")
    phases(tmp_path, "all layers", "all layers", health__check_data=False)
    assert phases(tmp_path, "other data", trainer__epochs=3)[:2] == first


def test_a_changed_first_call_resumes_from_the_folder_that_a_refusal_names(tmp_path: Path) -> None:
    first = phases(tmp_path, "all layers")
    phases(tmp_path, "all layers", "other data")
    with pytest.raises(CheckpointError, match=f"resume={tmp_path / 'checkpoints'};"):
        phases(tmp_path, "other data", trainer__epochs=3)
    named = {"checkpoint__resume": tmp_path / "checkpoints", "trainer__epochs": 3}
    assert phases(tmp_path, "other data", **named)[:2] == first


def test_a_later_call_whose_folder_cannot_be_read_stops_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, entries = phases(tmp_path, "all layers"), Store.entries
    (unreadable := tmp_path / "checkpoints-2").mkdir()

    def read(store: Store) -> list[Any]:
        if store.directory == unreadable:
            raise PermissionError
        return entries(store)

    monkeypatch.setattr(Store, "entries", read)
    assert phases(tmp_path, "other data", trainer__epochs=3)[:2] == first


def called(words: list[str]) -> tuple[dict[str, list[float]], list[int], list[bytes]]:
    """History, its epochs and the bits of all weights after a `fit` with arguments of Keras."""
    keras.utils.clear_session()
    with Trainer(overrides=words) as trainer:
        keras.utils.set_random_seed(5)
        x, y = data()
        history = trainer.fit(
            model(),
            x,
            y,
            batch_size=BATCH,
            epochs=7,
            initial_epoch=1,
            steps_per_epoch=4,
            validation_split=0.1,
        )
        bits = [v.numpy().tobytes() for v in trainer.model.variables]
        return history.history, history.epoch, bits


def calls_in_parts(directory: str, backend: str, *ends: int) -> list[Any]:
    """As `in_parts`; nine batches a pass are epochs of 4, 4 and 1."""
    plain = {"backend": backend, "trainer__accumulate": 1}

    def words(name: str, **more: Any) -> list[str]:
        given = settings(Path(directory) / name, **plain, **more)
        return [w for w in given if not w.startswith(("data.batch_size", "trainer.epochs"))]

    whole = called(words("whole"))
    for end in ends:
        called(words("parts", trainer__max_steps=end))
    return [whole, called(words("parts"))]


@pytest.mark.exhaustive
def test_fits_that_continue_one_another_resume_to_the_bit(
    tmp_path: Path, ranks: Callable[..., Any]
) -> None:
    # Steps are counted from epoch 1 on: stopped inside an epoch, and where a pass has ended.
    whole, parts = calls_in_parts(str(tmp_path / "one"), "local", 6, 13)
    assert parts == whole
    assert whole[1] == [1, 2, 3, 4, 5, 6]
    for whole, parts in ranks(2).run(
        calls_in_parts, str(tmp_path / "two"), "data_parallel", 14, deadline=200
    ):
        assert parts == whole


def test_another_seed_of_the_order_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    def run(seed: int | None, **more: Any) -> Any:
        keras.utils.clear_session()
        with Trainer(overrides=settings(tmp_path, **more)) as trainer:
            if seed is not None:
                keras.utils.set_random_seed(seed)
            return trainer.fit(model(), data()).history

    run(3, trainer__max_steps=2)
    with pytest.raises(CheckpointError, match=r"seed: 3 then, 4 now"):
        run(4)


class StopsAtLeastLoss(keras.callbacks.Callback):
    """As Keras' guide has it, with counters: a loss above the least one for two epochs stops it."""

    calls = 0

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.patience, self.best_weights = patience, None
        self.losses: dict[str, list[float]] = {"all": []}
        self.decay, self.ends = tf.Variable(1.0), keras.Variable(0, dtype="int32")

    def on_train_begin(self, logs: Any = None) -> None:
        self.wait, self.best = 0, np.inf

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        self.decay.assign(0.99 * self.decay)
        self.model.optimizer.learning_rate = 0.2 * (1 + self.calls % 7) * self.decay

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses["all"].append(np.float64(logs["loss"]))
        self.ends.assign_add(1)
        if logs["loss"] < self.best:
            self.best, self.wait, self.best_weights = logs["loss"], 0, self.model.get_weights()
        else:
            self.wait += 1
        if self.wait == self.patience:
            self.model.stop_training = True
            self.model.set_weights(self.best_weights)


@pytest.mark.parametrize("end", [8, 13, 20])
def test_what_a_callback_counts_without_state_dict_resumes(tmp_path: Path, end: int) -> None:
    made: list[StopsAtLeastLoss] = []

    def run(name: str, patience: int = 2, **limits: Any) -> Any:
        def callbacks() -> list[Any]:
            made.append(StopsAtLeastLoss(patience))
            return [made[-1]]

        more = {"trainer__accumulate": 1, "trainer__epochs": 6, **limits}
        return train(settings(tmp_path / name, **more), callbacks, plain_rate)

    whole = run("whole")
    run("parts", patience=5, trainer__max_steps=end)
    assert run("parts") == whole
    first, again = made[0], made[-1]
    assert (again.calls, again.wait, again.best) == (first.calls, first.wait, first.best)
    assert (again.losses, again.patience) == (first.losses, 2)
    assert (int(again.ends), float(again.decay)) == (int(first.ends), float(first.decay))
    for one, two in zip(again.best_weights, first.best_weights, strict=True):
        np.testing.assert_array_equal(one, two)


def test_callbacks_that_change_arrays_or_sets_are_named(tmp_path: Path) -> None:
    class Keeps(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.seen, self.table = np.zeros(3), set(), np.ones(2)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.counts[epoch % 3] += 1
            self.seen.add(epoch)

    with pytest.warns(UserWarning, match="because it changes counts, seen: they hold numbers"):
        train(settings(tmp_path, trainer__accumulate=1), lambda: [Keeps()], plain_rate)


def test_a_callback_is_restored_whole_or_not_at_all() -> None:
    class Keeps(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.shared, self.counts = 0, shared, np.zeros(2)
            self.own, self.others = tf.Variable(1.0), [tf.Variable(1.0)]
            self.of_model = of_model

    shared: list[int] = []
    of_model = tf.Variable(1.0)
    callback = Keeps()
    note_attributes([callback])
    shared.append(1)
    callback.count = 1
    callback.own.assign(2.0)
    callback.others[0].assign(2.0)
    states, _ = callback_states([callback])
    assert states[0]["attributes"] == {"count": 1, "shared": [1], "own": 2.0}
    callback.own.assign(3.0)
    of_model.assign(4.0)  # as a restored model has it
    shared.append(2)
    load_callback_states([callback], states, {})
    assert callback.shared is shared
    assert shared == [1]
    assert (float(callback.own), float(callback.others[0]), float(of_model)) == (2.0, 2.0, 4.0)
    callback.count, callback.counts[0] = 2, 1
    with pytest.warns(UserWarning, match="because it changes counts: they hold"):
        nothing, _ = callback_states([callback])
    assert nothing[0]["attributes"] == {}
    load_callback_states([callback], nothing, {})
    assert (callback.count, callback.counts[0]) == (2, 1)
    load_callback_states([callback], states, {}, attributes=False)
    assert callback.count == 2
