"""Writes checkpoints, one at a time, behind the training.

    all ranks together, between two steps       a thread of each rank that writes
    the write before has ended, without error
    rank 0 makes the temporary folder
    (the next step)                             arrays, state, manifest; rename; prune

Threads send no message but by `Parts`, whose communicator nobody else uses, so that they never
come between the collectives of the steps.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.format import begin, make_private
from ktrainer.checkpoint.parts import Parts
from ktrainer.checkpoint.snapshot import Snapshot, model_text
from ktrainer.checkpoint.store import Store
from ktrainer.errors import CheckpointError, SetupError
from ktrainer.folderlock import FolderLock
from ktrainer.restarted import note_save
from ktrainer.steps.placement import placement_of
from ktrainer.world import World

# Those of which nobody called `close`, as Keras' own fit does not after an error.
_open: weakref.WeakSet[Saver] = weakref.WeakSet()


class Saver:
    """Writes the checkpoints of one `fit`. All ranks make it together, unless `alone`.

    Args:
        directory: of the checkpoints; locked against other jobs until `close`.
        model: whose states are saved, prepared by its backend.
        world: the ranks. Rank 0 writes; under a pipeline, each stage of replica 0 its part.
        asynchronous: whether training goes on while a checkpoint is written.
        alone: the other ranks have made theirs already.

    Raises:
        SetupError: on all ranks: the folder cannot be written, or another job is in it.
    """

    def __init__(
        self,
        directory: Path,
        model: Any,
        world: World,
        asynchronous: bool,
        alone: bool = False,
    ) -> None:
        self.store, self.world, self.asynchronous = Store(directory), world, asynchronous
        self._model = model
        self._lock = None if alone else _take_folder(self.store, world)
        self._parts: Parts | None = None
        self._texts: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._ending = threading.Event()
        self._number = 0  # of saves so far
        self._began, self._longest = 0.0, 0.0  # of the writes, in seconds
        self._told = False  # whether an error was raised
        _open.add(self)

    # -- all ranks together

    def save(self, snapshot: Snapshot, prune: Callable[[Store], None]) -> None:
        """Start to write a checkpoint; `prune` follows if that succeeds.

        Raises:
            CheckpointError: on all ranks, if the one before, or a first look at the folder,
                failed; if not `asynchronous`, also if this one does.
        """
        if self._number == 0:
            self._first()
        error, self._number = self._ended(), self._number + 1
        path, folder = self.store.path_of(snapshot.step), None
        if self.world.is_root and error is None:
            try:
                folder = str(begin(path.absolute()))
            except CheckpointError as problem:
                error = str(problem)
        folder, error = self.world.broadcast((folder, error), 0, "start of a checkpoint")
        self._raise(error)
        if self.world.is_root:
            self._run(partial(self._write, Path(folder), snapshot, prune))
        elif self._parts is not None:
            self._run(
                partial(
                    self._parts.send,
                    self._number,
                    Path(folder),
                    snapshot.arrays,
                    ending=self._is_ending,
                )
            )
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, if there is one.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        self._raise(self.world.broadcast(self._ended(), 0, "end of a checkpoint"))

    def close_together(self) -> None:
        """Wait, and let go of what the ranks share."""
        self.wait()
        if self._parts is not None:
            self._parts.close()

    def _raise(self, error: str | None) -> None:
        if error is not None:
            self._told = True
            raise CheckpointError(error)

    def _first(self) -> None:
        """What is needed once a first checkpoint is written."""
        placement = placement_of(self._model)
        if placement is not None and placement.replica == 0:
            self._parts = Parts(placement)
        if self.world.is_root:
            self._texts = model_text(self._model)

    # -- this rank alone

    def ranks_changed(self) -> None:
        """Ranks have died or joined: if this one is the first now, it takes over the folder.

        Raises:
            SetupError: the folder cannot be written, or another job is in it.
        """
        if not self.world.is_root or self._lock is not None:
            return
        self._lock, error = hold_folder(self.store)
        if error is not None:
            raise SetupError(error)
        self._texts = model_text(self._model)

    def close(self) -> None:
        """End the write under way, if training has ended without `close_together`: with an error.

        It is completed, unless it needs a part of a process that does not answer.
        """
        self._ending.set()
        error = None if self._told else self._ended()
        _open.discard(self)
        if self._lock is not None:
            self._lock.release()
        if error is not None and self.world.is_root:
            warnings.warn(error, stacklevel=2)

    def _run(self, job: Callable[[], None]) -> None:
        if not self.asynchronous:
            self._guarded(job)
            return
        self._thread = threading.Thread(
            target=self._guarded, args=(job,), name="ktrainer-checkpoint", daemon=True
        )
        self._thread.start()

    def _guarded(self, job: Callable[[], None]) -> None:
        self._began = time.monotonic()
        try:
            job()
            self._longest = max(self._longest, time.monotonic() - self._began)
        except CheckpointError as error:
            self._error = str(error)
        except Exception as error:  # whatever it is, the next save tells it
            self._error = f"{type(error).__name__}: {error}"

    def settle(self) -> None:
        """Wait until nothing is being written here. What went wrong is for `save` or `wait`."""
        if self._thread is None or self._error is not None:
            return  # there is nothing to wait for, or no point in waiting once more
        # Less than what the other ranks wait meanwhile, so that they hear why.
        self._thread.join(0.8 * self.world.deadline)
        if not self._thread.is_alive():
            self._thread = None
            return
        self._error = (
            f"a checkpoint in {self.store.directory} is still being written after "
            f"world.deadline={self.world.deadline:g} s: the disk is slow, or does not answer. "
            "Save less often, or raise world.deadline."
        )

    def seconds_to_save(self) -> float:
        """How long a further checkpoint is likely to take, as far as earlier ones tell; 0 for the
        first, which is worth a try however long it takes."""
        if self._thread is None or not self._thread.is_alive():
            return self._longest
        lasts = time.monotonic() - self._began
        return max(0.0, self._longest - lasts) + max(self._longest, lasts)

    def _ended(self) -> str | None:
        """Wait until nothing is being written here; returns what went wrong, once."""
        self.settle()
        error, self._error = self._error, None
        return error

    def _write(self, folder: Path, snapshot: Snapshot, prune: Callable[[Store], None]) -> None:
        """Rank 0's work."""
        collect = None
        if self._parts is not None:
            collect = partial(
                self._parts.collect, self._number, names=snapshot.names, ending=self._is_ending
            )
        self.store.save(
            snapshot.arrays,
            snapshot.state,
            snapshot.step,
            temporary=folder,
            facts=snapshot.facts,
            texts=self._texts,
            write=collect,
        )
        note_save(self.store.directory, snapshot.step, snapshot.facts.get("run", ""))
        prune(self.store)

    def _is_ending(self) -> bool:
        return self._ending.is_set() or not threading.main_thread().is_alive()


def _take_folder(store: Store, world: World) -> FolderLock | None:
    """Before the first step: nobody else is in the folder, and it can be written."""
    lock, error = hold_folder(store) if world.is_root else (None, None)
    error = world.broadcast(error, 0, "folder of checkpoints")
    if error is not None:
        raise SetupError(error)
    return lock


def hold_folder(store: Store) -> tuple[FolderLock | None, str | None]:
    """(lock of the folder, what is wrong with it); clears up what a killed run left."""
    try:
        make_private(store.directory)
        lock = FolderLock(store.directory, "folder of checkpoints")
        store.sweep()
    except SetupError as problem:
        return None, str(problem)
    except OSError as problem:
        reason = problem.strerror or problem
        return None, f"checkpoints cannot be written to {store.directory}: {reason}"
    return lock, None


@atexit.register
def _settle_all() -> None:
    """Let what is being written be completed before the process ends."""
    for saver in list(_open):
        saver.settle()
