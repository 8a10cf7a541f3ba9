"""Write checkpoints in the background, one at a time.

    all ranks together, between two steps       a thread of each rank that writes
    wait for the previous write, check its error
    rank 0 makes the temporary folder
    (the next step)                             arrays, state, manifest; rename; prune

Threads communicate only through `StageParts`, on a communicator of its own, so that their messages
never mix with the collectives of the steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.contents.run_snapshot import Snapshot, model_text
from ktrainer.checkpoint.format.checkpoint_folder import make_private, make_temporary
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.checkpoint.stage_parts import StageParts
from ktrainer.distributed import World
from ktrainer.distributed.restart_records import note_save
from ktrainer.errors import CheckpointError, SetupError
from ktrainer.runtime.folder_lock import RETRY_SECONDS, FolderLock, seconds_after_loss
from ktrainer.steps.variable_placement import placement_of

# Where steps leave no processor idle, a tenth of one remains for the write; with the lowest
# priority, 19, it would be a seventieth.
NICENESS = 10

Saved = Callable[[int, Path, Mapping[str, Any]], None]  # step, folder, facts of its manifest

# Writers that were not closed: Keras' own fit does not close callbacks after an error.
_open: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


class BackgroundWriter:
    """Writes the checkpoints of one `fit`. All ranks make it together, unless `alone`.

    Args:
        directory: folder of the checkpoints; locked against other jobs until `close`.
        model: the model, prepared by its backend.
        world: the ranks. Rank 0 writes; under a pipeline, each stage of replica 0 its part.
        asynchronous: whether training continues while a checkpoint is written.
        alone: whether the other ranks have made theirs already.
        on_saved: called on rank 0 for each checkpoint once it is on the disk.

    Attributes:
        niceness: of the thread of the next write, beside that of steps.

    Raises:
        SetupError: on all ranks: the folder cannot be written, or another job uses it.
    """

    def __init__(
        self,
        directory: Path,
        model: Any,
        world: World,
        asynchronous: bool,
        alone: bool = False,
        on_saved: Sequence[Saved] = (),
    ) -> None:
        self.store, self.world, self.asynchronous = Store(directory), world, asynchronous
        self._model, self._on_saved = model, on_saved
        self.niceness = NICENESS
        self._lock = None if alone else _lock_on_root(self.store, world)
        self._parts: StageParts | None = None
        self._texts: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._ending = threading.Event()
        self._number = 0  # saves so far
        # Start of the last write, and the shortest: longer ones may have waited for steps. Seconds.
        self._began, self._shortest = 0.0, 0.0
        self._raised = False  # whether an error was raised
        _open.add(self)

    # -- all ranks together

    def save(self, snapshot: Snapshot, prune: Callable[[Store], None]) -> None:
        """Start to write a checkpoint; call `prune` after it succeeds.

        Raises:
            CheckpointError: on all ranks, if the previous write failed, or the folder cannot be
                made; if not `asynchronous`, also if this write fails.
        """
        if self._number == 0:
            self._first()
        error, self._number = self._ended(), self._number + 1
        path, folder = self.store.path_of(snapshot.step), None
        if self.world.is_root and error is None:
            try:
                folder = str(make_temporary(path.absolute()))
            except CheckpointError as problem:
                error = str(problem)
        folder, error = self.world.broadcast((folder, error), 0, "start of a checkpoint")
        self._told(error)
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
        """Wait for the write in progress, if there is one.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        self._told(self.world.broadcast(self._ended(), 0, "end of a checkpoint"))

    def close_together(self) -> None:
        """Wait, and close the resources that the ranks share."""
        self.wait()
        if self._parts is not None:
            self._parts.close()

    def _told(self, error: str | None) -> None:
        """Raise the error that all ranks know of now. Had a rank been lost meanwhile, the next call
        would tell them."""
        self._error = None
        if error is not None:
            self._raised = True
            raise CheckpointError(error)

    def _first(self) -> None:
        """Prepare for the first checkpoint."""
        placement = placement_of(self._model)
        if placement is not None and placement.replica == 0:
            self._parts = StageParts(placement)
        if self.world.is_root:
            self._texts = model_text(self._model)

    # -- this rank alone

    def ranks_changed(self) -> None:
        """After ranks failed or joined: take over the folder if this rank is the first now.

        Raises:
            SetupError: the folder cannot be written, or another job uses it.
        """
        if not self.world.is_root or self._lock is not None:
            return
        self._lock, error = lock_folder(self.store, seconds_after_loss(self.world.deadline))
        if error is not None:
            raise SetupError(error)
        self._texts = model_text(self._model)

    def close(self) -> None:
        """End the write in progress, after training has ended with an error, without
        `close_together`. It completes unless it needs a part of a process that does not answer."""
        self._ending.set()
        error = None if self._raised else self._ended()
        self._error = None
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
            target=self._run_in_thread, args=(job,), name="ktrainer-checkpoint", daemon=True
        )
        self._thread.start()

    def _run_in_thread(self, job: Callable[[], None]) -> None:
        """Do `job` in this thread of its own, which yields to steps where processors are few."""
        if sys.platform == "linux":  # elsewhere `nice` changes the whole process
            with suppress(OSError):  # where that is forbidden, the write is as important as steps
                os.nice(self.niceness)  # of this thread, and of those that it starts
        self._guarded(job)

    def _guarded(self, job: Callable[[], None]) -> None:
        self._began = time.monotonic()
        try:
            job()
            took = time.monotonic() - self._began
            self._shortest = min(self._shortest or took, took)
        except CheckpointError as error:
            self._error = str(error)
        except Exception as error:  # of any type: the next save raises it
            self._error = f"{type(error).__name__}: {error}"

    def settle(self) -> None:
        """Wait for this rank's write in progress. `save` or `wait` raise its error."""
        if self._thread is None or self._error is not None:
            return  # nothing is being written, or a wait has failed already
        # Shorter than the other ranks' wait meanwhile, so that they get this error.
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
        """Estimated seconds of the next checkpoint, from earlier ones; 0 for the first, which is
        always worth a try."""
        if self._thread is None or not self._thread.is_alive():
            return self._shortest
        lasts = time.monotonic() - self._began
        return max(0.0, self._shortest - lasts) + (self._shortest or lasts)

    def _ended(self) -> str | None:
        """Wait for this rank's write in progress; return its error."""
        self.settle()
        return self._error

    def _write(self, folder: Path, snapshot: Snapshot, prune: Callable[[Store], None]) -> None:
        """Write and prune, on rank 0."""
        collect = None
        if self._parts is not None:
            collect = partial(
                self._parts.collect, self._number, names=snapshot.names, ending=self._is_ending
            )
        path = self.store.save(
            snapshot.arrays,
            snapshot.state,
            snapshot.step,
            temporary=folder,
            facts=snapshot.facts,
            texts=self._texts,
            write=collect,
        )
        note_save(self.store.directory, snapshot.step, snapshot.facts.get("run", ""))
        for tell in self._on_saved:
            tell(snapshot.step, path, snapshot.facts)
        prune(self.store)

    def _is_ending(self) -> bool:
        return self._ending.is_set() or not threading.main_thread().is_alive()


def _lock_on_root(store: Store, world: World) -> FolderLock | None:
    """Lock the folder on rank 0, before the first step; raise on all ranks if that fails."""
    lock, error = lock_folder(store) if world.is_root else (None, None)
    error = world.broadcast(error, 0, "folder of checkpoints")
    if error is not None:
        raise SetupError(error)
    return lock


def lock_folder(
    store: Store, seconds: float = RETRY_SECONDS
) -> tuple[FolderLock | None, str | None]:
    """(lock of the folder, error message), within `seconds`; cleans up after a killed run."""
    try:
        make_private(store.directory)
        lock = FolderLock(store.directory, "folder of checkpoints", seconds)
        store.sweep()
    except SetupError as problem:
        return None, str(problem)
    except OSError as problem:
        reason = problem.strerror or problem
        return None, f"checkpoints cannot be written to {store.directory}: {reason}"
    return lock, None


@atexit.register
def _settle_all() -> None:
    """Complete writes in progress before the process exits."""
    for saver in list(_open):
        saver.settle()
