"""Row 8: a preempted process finishes its step and saves; the next start resumes from there."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import ktrainer.checkpoint.format.checkpoint_folder as format_module
from ktrainer import ConfigError, Interrupted, Trainer
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.config import load_config
from ktrainer.data.prefetch_thread import Prefetcher
from ktrainer.training import preemption
from tests.dist.small import group_mode
from tests.faults import asking
from tests.faults.asking import Asks, case_of, in_two, no_checkpoint, whole
from tests.faults.runs import BATCH, CASES, STEPS, arrays, settings, train
from tests.faults.test_resume import differences
from tests.tf_distribute.launching import LAUNCH, QUIET, SERVERS, Start, script, start, wait_for
from tests.tf_distribute.running import CLUSTER

__all__ = ["script", "start"]

HANDLED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`undisturbed(*words)`: a run that is not interrupted, and its validations inside epochs."""
    found: dict[tuple[str, ...], Any] = {}

    def run(*words: str) -> Any:
        if words not in found:
            found[words] = whole(tmp_path_factory.mktemp("undisturbed"), "compiled", *words)
        return found[words]

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["callbacks", "precision"])
def test_row_08_at_any_step(tmp_path: Path, name: str) -> None:
    """One inside an epoch, and the last."""
    before = [signal.getsignal(number) for number in HANDLED]
    expected, _ = whole(tmp_path, name)
    for step in (5, STEPS) if name == "callbacks" else (5,):
        number = HANDLED[step % 2]
        ended, found, _ = in_two(tmp_path, name, Asks(step, number=number))
        assert (ended.code, ended.step, ended.signal) == (75, step, number)
        assert ended.checkpoint
        assert ended.checkpoint.endswith(f"/checkpoints/step-{step:08d}")
        assert f"interrupted by {number.name} at step {step}, checkpoint /" in str(ended)
        assert not differences(found, expected), step
    assert [signal.getsignal(number) for number in HANDLED] == before


@pytest.mark.quick("validation-2-words0")
@pytest.mark.parametrize(
    ("during", "step", "words"),
    [
        ("validation", 2, ()),  # at an epoch's end
        ("validation", 6, ("trainer.validate_every=3ba",)),  # after an epoch's last update
        ("epoch end", 4, ()),
    ],
)
def test_row_08_in_validation(
    tmp_path: Path, undisturbed: Callable[..., Any], during: str, step: int, words: tuple[str, ...]
) -> None:
    expected, validated = undisturbed(*words)
    ended, found, again = in_two(tmp_path, "compiled", Asks(step, during=during), *words)
    assert (ended.code, ended.step, ended.saved_at) == (75, step, step)
    assert not differences(found, expected)
    assert again == validated


def test_row_08_before_the_first_step(tmp_path: Path, undisturbed: Callable[..., Any]) -> None:
    """There is nothing to save: the same command starts afresh."""
    expected, _ = undisturbed()
    ended, found, _ = in_two(tmp_path, "compiled", Asks(0, during="begin"))
    assert (ended.code, ended.step, ended.checkpoint) == (143, 0, None)
    assert not differences(found, expected)


@pytest.mark.exhaustive
def test_row_08_before_the_first_step_with_a_limit_of_time(tmp_path: Path) -> None:
    """Then the ranks agree before the first step too: on the time that earlier starts have used."""
    limit, asks = "trainer.max_time=10m", Asks(0, during="begin")
    ended, _, _ = in_two(tmp_path, "compiled", asks, limit)
    assert (ended.code, ended.step, ended.checkpoint) == (143, 0, None)
    with pytest.raises(Interrupted) as third:
        train(tmp_path / "run", case_of("compiled", Asks(3)), limit)
    with pytest.raises(Interrupted) as again:
        train(tmp_path / "run", case_of("compiled", Asks(0, during="begin")), limit)
    assert (third.value.code, third.value.step) == (75, 3)
    assert (again.value.code, again.value.step, again.value.saved_at) == (75, 3, 3)


ASKED_AT_ONCE = """
import os, signal, sys
import keras, numpy as np
from ktrainer import Callback, Trainer

class Asks(Callback):
    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, logs=None):
        print("ended", flush=True)

def build():
    layers = [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Asks()])
x = np.ones((64, 6), "float32")
trainer.fit(build, (x, x[:, :3]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        ("-n", 2, "backend=data_parallel"),
        ("-n", 2, "backend=pipeline", "backend.partitions=1"),
    ],
    ids=["data_parallel", "pipeline"],
)
def test_row_08_before_the_first_step_where_ranks_may_die(
    start: Start, tmp_path: Path, words: tuple[object, ...]
) -> None:
    path = tmp_path / "asked.py"
    path.write_text(ASKED_AT_ONCE)
    settings = ("trainer.max_time=10m", "logging.progress=none", f"run.dir={tmp_path / 'run'}")
    launcher = start(*LAUNCH, "--heal", *words[:2], path, *words[2:], *settings)
    out, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 143, errors
    assert sorted(line[-8:] for line in out.splitlines()) == ["0] ended", "1] ended"]
    said = "ktrainer run: interrupted by SIGTERM at step 0, and there is no checkpoint"
    assert errors.splitlines()[-1] == said


@pytest.mark.quick("named")
@pytest.mark.parametrize(
    ("words", "adds"),
    [
        ((), ""),
        (("checkpoint.resume=RUN/checkpoints",), ""),
        (("run.dir=null",), "checkpoint.resume=LAST"),
        (("run.dir=RUN-{time}",), "checkpoint.resume=LAST"),
        (("run.dir=null", "checkpoint.dir=saved"), ""),
        (("checkpoint.resume=never",), "checkpoint.resume=LAST"),
    ],
    ids=["named", "own folder", "new folder", "by time", "own place", "never"],
)
def test_the_message_about_resuming_is_true(
    tmp_path: Path, undisturbed: Callable[..., Any], words: tuple[str, ...], adds: str
) -> None:
    expected, _ = undisturbed()
    words = tuple(word.replace("RUN", str(tmp_path / "run")) for word in words)
    if "checkpoints" in str(words):  # there must be one to begin with
        train(tmp_path / "run", CASES["compiled"], "trainer.max_steps=1")
    with pytest.raises(Interrupted) as raised:
        train(tmp_path / "run", case_of("compiled", Asks(3)), "checkpoint.every=100ba", *words)
    ended = pickle.loads(pickle.dumps(raised.value))
    assert (ended.code, ended.saved_at) == (75, 3)
    assert ended.add == adds.replace("LAST", str(ended.checkpoint))
    how = f"the command again with {ended.add}" if adds else "the same command again"
    assert str(ended).endswith(f"step-00000003; run {how} to resume")
    again = Asks(-1)
    found = train(tmp_path / "run", case_of("compiled", again), *words, *ended.add.split())
    assert again.first == 3
    assert not differences(found, expected)


@pytest.mark.exhaustive
def test_what_is_said_in_the_second_fit_is_true(tmp_path: Path) -> None:
    """A path is where the first one begins."""

    def both(asks: Asks, *words: str) -> list[Any]:
        keras.utils.clear_session()
        case = CASES["compiled"]
        words = (*settings(tmp_path / "run", case, "checkpoint.every=100ba"), *words)
        with Trainer(overrides=words) as trainer:
            trainer.fit(case.model, arrays(8))
            trainer.fit(trainer.model, arrays(8), callbacks=[asks])
            return [v.numpy().tobytes() for v in trainer.model.weights]

    expected = both(Asks(-1), f"run.dir={tmp_path / 'whole'}")
    for words in (("run.dir=null",), ("checkpoint.resume=never",)):
        with pytest.raises(Interrupted) as ended:
            both(Asks(3), *words)
        last = Path(str(ended.value.checkpoint))
        assert last.parent.name == "checkpoints-2"
        new = f"run.dir={last.parents[1]}"
        assert ended.value.add == (new if "null" in words[0] else "checkpoint.resume=auto")
        again = Asks(-1)
        assert both(again, *words, *ended.value.add.split()) == expected
        assert again.first == 3


def test_row_08_in_a_save(tmp_path: Path, monkeypatch: Any) -> None:
    """What is being written is completed; the state of the last step is saved after it."""

    def asks(at: str, path: Path) -> None:
        if at == "before file" and path.name == MANIFEST and "step-00000002" in path.parent.name:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(format_module, "fault_point", asks)
    with pytest.raises(Interrupted) as ended:
        train(tmp_path, CASES["compiled"], "checkpoint.every=2ba")
    steps = {entry.step for entry in Store(tmp_path / "checkpoints").entries()}
    assert {2, ended.value.step} <= steps
    assert ended.value.saved_at == ended.value.step
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name[0] == "."]


def main_thread_is_in(name: str) -> bool:
    """Whether the function that the main thread executes has this name."""
    frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    return frame.f_code.co_name == name


def test_row_08_while_it_waits_for_data(
    tmp_path: Path, monkeypatch: Any, within: Callable[..., None]
) -> None:
    trained, release = threading.Event(), threading.Event()

    def waits() -> bool:
        return trained.is_set() and main_thread_is_in("wait")

    def batches() -> Iterator[Any]:
        x, y = arrays(16)
        for first in range(0, 16, BATCH):
            if first == 12:
                within(60, waits)
                os.kill(os.getpid(), signal.SIGTERM)
                release.wait(60)
            yield x[first : first + BATCH], y[first : first + BATCH]

    close = Prefetcher.close

    def closed(self: Prefetcher, *args: Any) -> None:
        release.set()
        close(self, *args)

    monkeypatch.setattr(Prefetcher, "close", closed)
    done = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.set())
    words = settings(tmp_path, CASES["compiled"], "trainer.epochs=1", "checkpoint.every=100ba")
    with Trainer(overrides=words, callbacks=[done]) as trainer, pytest.raises(Interrupted) as ended:
        trainer.fit(CASES["compiled"].model, batches)
    assert 0 < ended.value.step == ended.value.saved_at < 4


class AsksLater(Asks):
    """Asks while the batch after a step is waited for."""

    def _ask(self, during: str) -> None:
        if during == "step" and self.progress.step == self.step:
            self.step = -1
            threading.Thread(target=self._ask_in_wait).start()

    def _ask_in_wait(self) -> None:
        end = time.monotonic() + 20
        while not main_thread_is_in("iterator_get_next") and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), self.number)


def test_row_08_while_it_waits_for_tf_data(tmp_path: Path) -> None:
    """TensorFlow does not end the wait: the batch that comes then is trained on, not lost."""
    expected, _ = whole(tmp_path, "slow tf.data")
    ended, found, _ = in_two(tmp_path, "slow tf.data", AsksLater(4))
    assert not differences(found, expected)
    assert ended.saved_at == ended.step == 5


@pytest.mark.exhaustive
def test_row_08_when_nothing_can_be_saved(tmp_path: Path, monkeypatch: Any) -> None:
    """Checkpointing is off, or the grace is too short: then the last checkpoint stands."""
    ended = no_checkpoint(tmp_path / "off")
    assert ended is not None
    assert (ended.code, ended.step, ended.checkpoint) == (143, 2, None)

    def slowly(at: str, path: Path) -> None:
        if at == "after file" and path.name == MANIFEST:
            time.sleep(1.0)

    monkeypatch.setattr(format_module, "fault_point", slowly)
    for grace, saved_at in ((1.05, 4), (30, 5)):
        words = ("checkpoint.every=2ba", f"trainer.interrupt.grace={grace}")
        with pytest.raises(Interrupted) as raised:
            train(tmp_path / f"{grace}", case_of("compiled", Asks(5)), *words)
        assert (raised.value.code, raised.value.step, raised.value.saved_at) == (75, 5, saved_at)
        assert f"at step 5, checkpoint {'of step 4 ' * (saved_at == 4)}/" in str(raised.value)


class Twice(Asks):
    def on_step_end(self, step: int, logs: Any = None) -> None:
        super().on_step_end(step, logs)
        if self.step == -1:
            os.kill(os.getpid(), signal.SIGINT)


def test_row_08_a_second_signal_ends_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(Interrupted):  # one request, which came twice
        train(tmp_path / "same", case_of("compiled", Twice(3)))
    monkeypatch.setattr(preemption, "_SAME_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "second", case_of("compiled", Twice(3)))


def test_which_signals() -> None:
    words = "trainer.interrupt.signals"
    assert load_config(None, [f"{words}=[SIGUSR1]"]).trainer.interrupt.signals == ["SIGUSR1"]
    with pytest.raises(ConfigError, match="Did you mean 'SIGTERM'"):
        load_config(None, [f"{words}=[SIGTREM]"])
    with pytest.raises(ConfigError, match="'SIGKILL' is none of SIGTERM"):
        load_config(None, [f"{words}=[SIGKILL]"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("data_parallel", "mpi"),
        pytest.param("data_parallel", "horovod", marks=pytest.mark.horovod),
        ("pipeline", "mpi"),
    ],
)
def test_row_08_on_ranks(
    ranks: Callable[..., Any], tmp_path: Path, backend: str, engine: str
) -> None:
    """Rank 1 alone is asked."""
    check(ranks(2, group_mode(engine)), tmp_path, 1, backend, f"backend.engine={engine}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        ("-n", 2, "backend=data_parallel"),
        ("--workers", 1, "--servers", 1, *SERVERS),
    ],
    ids=["data_parallel", "parameter_server"],
)
def test_row_08_under_the_launcher(
    start: Start, script: Path, tmp_path: Path, words: tuple[object, ...]
) -> None:
    """It passes the signal on, and says how to resume; no process has to be killed."""
    count = 1 + max(i for i, word in enumerate(words) if isinstance(word, int))
    settings = ("checkpoint.every=1000ba", f"run.dir={tmp_path / 'run'}", "trainer.epochs=99")
    command = (*LAUNCH, *words[:count], script, *words[count:], *QUIET, "data.batch_size=16")
    launcher = start(*command, *settings)
    wait_for(launcher, "ready")
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=25)
    assert launcher.returncode == 75, errors
    last = errors.splitlines()[-1]
    found = re.match(r"ktrainer run: interrupted by SIGTERM at step (\d+), checkpoint (\S+);", last)
    assert found, errors
    assert Path(found[2]).name == f"step-{int(found[1]):08d}"
    assert Path(found[2]).is_dir()


@pytest.mark.exhaustive
def test_row_08_workers(ranks: Callable[..., Any], tmp_path: Path) -> None:
    check(ranks(2, f"{CLUSTER} 1"), tmp_path, 1, "workers")


def check(group: Any, folder: Path, rank: int, backend: str, *words: str) -> None:
    task = (asking.on_ranks, str(folder), "short", rank, backend, *words)
    for ended, saved, found, expected in group.run(*task, deadline=180):
        assert (ended.code, ended.step) == (75, 3)
        assert saved == [3]
        assert not differences(found, expected)
