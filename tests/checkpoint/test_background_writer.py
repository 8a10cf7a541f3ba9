"""Checkpoints are written behind the steps, one at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import ktrainer.checkpoint.format.checkpoint_folder as format_module
from ktrainer import distributed
from ktrainer.callbacks import Callback, Checkpoint
from ktrainer.checkpoint import read_checkpoint
from ktrainer.checkpoint.background_writer import NICENESS, BackgroundWriter
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError, PeerLost, SetupError
from tests.callbacks.helpers import fit, small_model
from tests.checkpoint.stages import close, cut, same, values, whole_model
from tests.small import build, data, trainer

THREAD = "ktrainer-checkpoint"


class Gate:
    """Holds the writer at its first file until `open` is set, and counts.

    Attributes:
        writers: the threads that have begun.
        at_once: the most checkpoints that were being written at the same time.
    """

    def __init__(self) -> None:
        self.open, self.at = threading.Event(), threading.Event()
        self.writers: list[str] = []
        self.inside, self.at_once = 0, 0

    def __call__(self, point: str, path: Path) -> None:
        if point == "after rename":
            self.inside -= 1
        if point == "before file" and path.name.startswith("arrays"):
            self.inside += 1
            self.at_once = max(self.at_once, self.inside)
            self.writers.append(threading.current_thread().name)
            self.at.set()
            assert self.open.wait(20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(format_module, "fault_point", gate)
    yield gate
    gate.open.set()


class Watch(Callback):
    """Keeps the weights after each step, and opens the gate after some."""

    def __init__(self, gate: Gate, opens: int) -> None:
        super().__init__()
        self.gate, self.opens = gate, opens
        self.weights: dict[int, bytes] = {}
        self.behind: list[int] = []

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.weights[step] = self.model.trainable_weights[0].numpy().tobytes()
        assert step != 3 or self.gate.at.wait(20)
        if not self.gate.open.is_set() and self.gate.at.is_set():
            self.behind.append(step)
        if step == self.opens:
            self.gate.open.set()


def steps(directory: Path) -> list[int]:
    return sorted(entry.step for entry in Store(directory).entries())


def test_training_continues_while_a_checkpoint_is_written(tmp_path, gate) -> None:
    watch = Watch(gate, opens=5)
    fit(small_model(), [Checkpoint(tmp_path, every="3ba", keep=9), watch], rows=100)
    assert watch.behind == [3, 4, 5]
    assert gate.writers == [THREAD] * 3
    assert steps(tmp_path) == [3, 6, 9]
    for entry in Store(tmp_path).entries():  # what is written is of the step that it says
        arrays, state = read_checkpoint(entry.path)
        kernel = next(array for name, array in arrays.items() if name.startswith("model/"))
        assert kernel.tobytes() == watch.weights[entry.step]
        assert state["progress"]["step"] == entry.step
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def test_one_at_a_time(tmp_path, gate) -> None:
    """The second save waits until the first is there."""

    class Opens(Callback):
        def on_step_begin(self, step: int) -> None:
            if step == 3:  # the save after this step waits for that after the first
                self.timer = threading.Timer(0.3, gate.open.set)
                self.timer.start()

    opens = Opens()
    fit(small_model(), [Checkpoint(tmp_path, every="2ba", keep=9), opens])
    opens.timer.join()
    assert (gate.at_once, gate.writers) == (1, [THREAD] * 2)
    assert steps(tmp_path) == [2, 4]


def test_synchronous_is_on_the_disk_when_it_returns(tmp_path) -> None:
    seen = []

    class Looks(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            seen.append(steps(tmp_path))

    fit(small_model(), [Checkpoint(tmp_path, every="2ba", keep=9, asynchronous=False), Looks()])
    assert seen == [[], [2], [2], [2, 4], [2, 4]]


def priority() -> int:
    """The niceness of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are those of Linux")
@pytest.mark.parametrize(("asynchronous", "added"), [(True, NICENESS), (False, 0)])
def test_a_write_in_the_background_has_a_lower_priority_than_steps(
    tmp_path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, added: int
) -> None:
    found: dict[str, set[int]] = {"files": set(), "checksums": set(), "steps": set()}

    class Digest:
        def __init__(self, *data: bytes) -> None:
            self.digest = blake3(*data)

        def update(self, piece: Any) -> None:
            found["checksums"].add(priority())
            self.digest.update(piece)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    class Steps(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            found["steps"].add(priority())

    def at(point: str, path: Path) -> None:
        if point == "before file":
            found["files"].add(priority())

    monkeypatch.setattr(format_module, "blake3", Digest)
    monkeypatch.setattr(format_module, "fault_point", at)
    own = priority()
    keeper = Checkpoint(tmp_path, every="2ba", keep=9, asynchronous=asynchronous)
    fit(small_model(), [keeper, Steps()])
    lower = min(19, own + added)
    assert found == {"files": {lower}, "checksums": {lower}, "steps": {own}}


def test_a_write_that_had_to_wait_is_no_estimate_of_the_next(tmp_path, monkeypatch) -> None:
    def slow_at_first(point: str, path: Path) -> None:
        if point == "before rename" and path.name == "step-00000002":
            time.sleep(1)

    class Asks(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step in (3, 5):
                keeper.wait()
                seconds.append(keeper._saver.seconds_to_save())

    monkeypatch.setattr(format_module, "fault_point", slow_at_first)
    keeper, seconds = Checkpoint(tmp_path, every="2ba", keep=9), list[float]()
    fit(small_model(), [keeper, Asks()], rows=100)
    assert seconds[1] < seconds[0]
    assert seconds[0] >= 1


def test_the_shortest_write_estimates_the_next_also_during_one(tmp_path, gate) -> None:
    class Asks(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 3:
                gate.open.set()
                keeper.wait()
                gate.open.clear()
                seconds.append(keeper._saver.seconds_to_save())
            if step == 5:
                time.sleep(seconds[0] + 1)
                seconds.append(keeper._saver.seconds_to_save())
                gate.open.set()

    keeper, seconds = Checkpoint(tmp_path, every="2ba", keep=9), list[float]()
    fit(small_model(), [keeper, Asks()], rows=100)
    assert 0 < seconds[0] == seconds[1]


def test_a_last_checkpoint_has_the_priority_of_steps(tmp_path, monkeypatch) -> None:
    found = list[int]()

    class Ends(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 5:
                keeper.wait()
                found.clear()
                keeper.save_in_time(60)

    def at(point: str, path: Path) -> None:
        found.append(priority())

    own = priority()
    monkeypatch.setattr(format_module, "fault_point", at)
    keeper = Checkpoint(tmp_path, every="2ba", keep=9)
    fit(small_model(), [keeper, Ends()])
    assert set(found) == {own}
    assert steps(tmp_path) == [2, 4, 5]


def test_an_error_in_training_waits_for_the_write(tmp_path, gate) -> None:
    class Fails(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 3:
                threading.Timer(0.1, gate.open.set).start()
                raise RuntimeError("of the user")

    keeper = Checkpoint(tmp_path, every="2ba", keep=9)
    with pytest.raises(RuntimeError, match="of the user"):
        fit(small_model(), [keeper, Fails()])
    keeper.close()
    assert steps(tmp_path) == [2]


def test_a_write_that_hangs_is_told(tmp_path, gate) -> None:
    distributed.current_world().deadline = 0.2
    keeper = Checkpoint(tmp_path, every="2ba", keep=9)
    try:
        with pytest.raises(CheckpointError, match=r"still being written after world\.deadline"):
            fit(small_model(), [keeper])
    finally:
        distributed.current_world().deadline = 300.0


DEADLINE = 40.0


def _hangs_on_rank_0(directory: str) -> None:
    here, release, join = distributed.current_world(), threading.Event(), threading.Thread.join

    def give_up(thread: threading.Thread, timeout: float | None = None) -> None:
        """Wait for the writer in vain, without taking that time."""
        if thread.name != THREAD or release.is_set():
            join(thread, timeout)
        else:
            assert timeout is not None
            assert timeout <= 0.8 * DEADLINE

    keeper = Checkpoint(directory, every="1ep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "deadline", DEADLINE)
        if here.is_root:
            patch.setattr(format_module, "fault_point", lambda at, path: release.wait(30))
            patch.setattr(threading.Thread, "join", give_up)
        try:
            fit(small_model(), [keeper], epochs=3)
        finally:
            release.set()
            keeper.close()


def test_a_write_that_hangs_is_told_on_all_ranks(ranks, tmp_path) -> None:
    """Rank 0 gives up before the others do, which wait for it meanwhile."""
    for outcome in ranks(2).outcomes(_hangs_on_rank_0, str(tmp_path)):
        assert isinstance(outcome.error, CheckpointError), outcome.traceback
        assert f"still being written after world.deadline={DEADLINE:g} s" in str(outcome.error)


def test_an_error_is_told_after_the_loss_of_a_rank(tmp_path) -> None:
    """Which interrupts the broadcast that would have told the others."""

    class Loses(SingleWorld):
        losses = 0

        def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
            self.losses -= 1
            if self.losses == 0:
                raise PeerLost("rank 1 was lost")
            return value

    def fails() -> None:
        raise OSError("no space left")

    world = Loses()
    writer = BackgroundWriter(tmp_path, small_model(), world, asynchronous=True)
    writer._run(fails)
    world.losses = 1
    with pytest.raises(PeerLost):
        writer.wait()
    with pytest.raises(CheckpointError, match="no space left"):
        writer.wait()
    writer.wait()  # once
    writer.close()


class CannotClose(Callback):
    def close(self) -> None:
        raise RuntimeError("of the user")


def test_a_callback_that_cannot_close_holds_nothing_up(tmp_path) -> None:
    words = {"checkpoint__every": "1ba", "run__dir": tmp_path}
    with trainer([CannotClose()], **words) as it, pytest.raises(RuntimeError, match="of the user"):
        it.fit(build, data())
    with trainer(**words) as it:
        it.fit(build, data())  # nothing is held any more
    assert not list(tmp_path.rglob(".lock"))


def test_a_state_that_is_no_json_is_told_at_once(tmp_path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    keeper = Checkpoint(tmp_path, every="2ba", callbacks=[Odd()])
    with pytest.raises(CheckpointError, match="state_dict"):
        fit(small_model(), [keeper])
    keeper.close()


def test_one_run_in_a_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        fit(small_model(), [Checkpoint(tmp_path / "file" / "below", every="2ba")])


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not list(path[0].glob(path[1])):
        assert time.monotonic() < end, path
        time.sleep(0.01)


def _save_at_once(directory: str, partitions: int) -> Any:
    """Each stage begins its file only once all others have begun theirs; no other stage waits."""
    rank = distributed.current_world().rank
    model = whole_model(epochs=1)
    expected = values(model)
    cut(model, partitions)
    keeper = Checkpoint(directory, every="1ep", keep=5)
    keeper.set_model(model)
    keeper.on_train_begin()
    threads = []

    def fault_point(point: str, path: Path) -> None:
        if point == "before file" and path.name.startswith("arrays"):
            threads.append(threading.current_thread().name)
            (Path(directory) / f"begun-{rank}").write_text("")
            for other in range(partitions):
                _wait_for((Path(directory), f"begun-{other}"))
            _wait_for((Path(directory), "trained"))

    kept, format_module.fault_point = format_module.fault_point, fault_point
    try:
        keeper.progress.step = 3
        assert keeper.save({"loss": 1.0})
        # All ranks train on, with collectives of their own, while parts are under way.
        total = sum(
            int(distributed.current_world().oob_allreduce(np.int64(rank), "sum")) for _ in range(50)
        )
        assert total == 50 * sum(range(distributed.current_world().size))
        if rank == 0:
            assert not Store(directory).entries()
            (Path(directory) / "trained").write_text("")
        keeper.on_train_end()
    finally:
        format_module.fault_point = kept
        keeper.close()
    close(model)
    return expected, threads


@pytest.mark.quick("2-2")
@pytest.mark.parametrize(("size", "partitions"), [(2, 2), (4, 2)])
def test_stages_write_at_once_behind_the_steps(ranks, tmp_path, size, partitions) -> None:
    found = ranks(size).run(_save_at_once, str(tmp_path), partitions, deadline=60)
    assert [threads for _, threads in found] == [[THREAD]] * partitions + [[]] * (size - partitions)
    arrays, _ = read_checkpoint(tmp_path / "step-00000003")
    same(dict(arrays), found[0][0])


def _ends_with_an_error(directory: str) -> float:
    """Stage 1 never writes its part; training ends with an error on stage 0."""
    here = distributed.current_world()
    model = whole_model()
    cut(model, 2)
    keeper = Checkpoint(directory, every="1ep", keep=5)
    keeper.set_model(model)
    keeper.on_train_begin()
    keeper.progress.step = 3

    def lost(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("lost")

    import ktrainer.checkpoint.stage_parts as parts_module

    kept = parts_module.StageParts.send, parts_module._GRACE_SECONDS
    parts_module.StageParts.send, parts_module._GRACE_SECONDS = lost, 0.3
    began = time.monotonic()
    try:
        keeper.save({"loss": 1.0})
        if here.is_root:
            with pytest.warns(UserWarning, match=r"received none from stage 1 \(rank 1\)"):
                keeper.close()
        else:
            keeper.close()
    finally:
        parts_module.StageParts.send, parts_module._GRACE_SECONDS = kept
    here.barrier()
    close(model)
    return time.monotonic() - began


def test_a_missing_part_blocks_no_rank(ranks, tmp_path) -> None:
    assert max(ranks(2).run(_ends_with_an_error, str(tmp_path))) < 10
    assert list(tmp_path.iterdir()) == []
