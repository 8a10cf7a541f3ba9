"""Hybrid runs: when ranks are lost, the surviving replicas save the state of all, just in time.

Replicas of a partition hold the same state, so that of a lost rank is still there as long as a
copy of its partition survives. The surviving ranks return to the last update that all of them
have finished, write a checkpoint of it, each partition by its first copy, and end. The next start,
which `ktrainer run --max-restarts` makes, resumes from there: however long ago the last
checkpoint was, no more is lost than the update under way. Where a partition has no copy left, the
next start resumes from the last checkpoint.

From Gupta et al., "Just-In-Time Checkpointing: Low Cost Error Recovery from Deep Learning Training
Failures" (EuroSys 2024), which takes a rank's state from a replica in the same way. There the ranks
that wait for a lost one save what they hold, each by itself; here they agree first on which update
it is, and write one checkpoint like any other, for any number of partitions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from ktrainer.checkpoint.checkpoint_callback import Checkpoint
from ktrainer.checkpoint.contents.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.contents.capture_state import capture, history_of, names_to_save
from ktrainer.checkpoint.contents.data_state import data_name
from ktrainer.checkpoint.contents.metric_state import states_of_ranks
from ktrainer.checkpoint.contents.run_snapshot import model_text
from ktrainer.checkpoint.format.checkpoint_store import Entry, Store
from ktrainer.data import data_fingerprint
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.distributed.restart_records import RECORDS, run_before
from ktrainer.elastic.just_in_time_checkpoint import Grid, LastState, write_last_checkpoint
from ktrainer.elastic.recovery_point import (
    MetricCountsRow,
    RecoveryPoint,
    VariableBackup,
    survivable_section,
)
from ktrainer.errors import CheckpointError, RanksLost
from ktrainer.state.progress import Phase, Progress
from ktrainer.state.time_shares import HEALING
from ktrainer.steps.variable_placement import Placement, place
from ktrainer.training.resume import words_to_resume

if TYPE_CHECKING:
    from ktrainer.training.recovery_protocol import ResumableLoop
    from ktrainer.training.run import Run


class JustInTimeRecovery:
    """Trains to the end, or until a rank is lost, and saves what survives.

    A commit is made once all callbacks have heard of an update, on all ranks at once
    (`ElasticWorld.agree`): so all surviving ranks have the same one, whatever part of a later
    update some of them have applied. None is made at a step at which training ends: what follows
    that step would be lost.

    Args:
        run: its callbacks, and where it saves.
        world: the ranks.
        placement: who holds what of the model.
    """

    def __init__(self, run: Run, world: ElasticWorld, placement: Placement) -> None:
        self.run, self.state, self.world = run, run.state, world
        self.model, self._placement = run.model, placement
        here = placement.partition, placement.replica
        self.grid = Grid(dict(enumerate(world.allgather(here, "partition of each rank"))))
        self._backup = VariableBackup(self.model, several=True)
        self._counts = MetricCountsRow(self.model)
        self._told = np.zeros((world.size, 0))  # what each rank has counted, as last exchanged
        self._counted = self._told  # the same, at the point
        self._point: RecoveryPoint | None = None
        self._data: bytes | None = None  # a state of the data that is common to all ranks, then

    def updates(self, loop: ResumableLoop) -> Generator[Any, Any, keras.callbacks.History]:
        """Yield all updates to the end.

        Raises:
            RanksLost: on all surviving ranks; it says what became of the state.
        """
        self._loop = loop
        with survivable_section(self.world):
            try:
                loop.begin()
                self.vote(np.zeros(0, np.int32), "metric counts of each rank")
                self.commit(Phase.CALLBACKS_DONE)
                history = yield from loop.updates()
                self.world.agree("end of training")
                return history
            except Exception as error:
                if not self.world.has_lost(error):
                    raise
                loss = error
            # Outside of the handler: there the loss would be any new error's context.
            try:
                self._end(loss)
            finally:
                del loss  # its traceback has this frame: a cycle would keep both

    # -- called by the loop

    def begin_step(self) -> None:
        """Nothing is prepared: a commit keeps everything."""

    def commit(self, phase: Phase, logs: Any = None) -> None:
        """Make the present the moment to return to, if callbacks have heard of the update and there
        is another one to come.

        Raises:
            PeerLost: on all ranks, which then return to the commit before.
        """
        state = self.state
        ends = state.stopped or state.out_of_time or self._loop.steps_left == 0
        if phase == Phase.UPDATED or ends:
            return
        with state.times.of(HEALING):
            states, arrays = callback_states(self.run.every, self.model, held=True)
            point = RecoveryPoint(
                phase=phase,
                progress=state.progress.to_dict(),
                history=history_of(self.model),
                states=copy.deepcopy(states),
                arrays=arrays,
                logs=state.counted.plain_logs(),
                update_invalid=state.update_invalid,
            )
            data = self._state_of_data()
            self.world.agree("a finished update")
            self._point, self._counted, self._data = point, self._told, data
            self._backup.keep()

    def _state_of_data(self) -> bytes | None:
        """What the order of the data depends on now; None if that is no more than the position, or
        each rank's own."""
        feed = self.state.feed
        kept = feed.state_is_common and self.run.context.config.checkpoint.iterators
        return feed.state(self.state.progress.batch > 0) if kept else None

    def vote(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The maximum over ranks of each of `flags` (int32); the ranks also exchange their metric
        counts."""
        counted = self.state.counted
        examples = [float(counted.examples), float(counted.last)]
        row = np.concatenate([flags.astype(np.float64), examples, self._counts.row()])
        table = self.world.gather_rows(row, what)
        self._told = table[:, flags.size :]
        agreed: np.ndarray = table[:, : flags.size].max(axis=0).astype(np.int32)
        return agreed

    def close(self) -> None:
        """Nothing is held."""

    # -- after a rank was lost

    def _end(self, error: Exception) -> NoReturn:
        lost, cause = list[int](), error
        while True:
            try:
                lost += [member.stable_rank for member in self.world.heal()]
                text, path = self._save()
                break
            except Exception as another:  # one more was lost meanwhile
                if not self.world.has_lost(another):
                    raise
                cause = another
        names = " and ".join(self.grid.name(rank) for rank in sorted(lost))
        if not lost:  # all have answered since
            names = f"no rank, though MPI reported one ({cause}),"
        were = "were" if len(lost) > 1 else "was"
        step = self._point.order[0] if self._point is not None else 0
        message = f"{names} {were} lost after step {step}: {text}{self._advice(path)}"
        raise RanksLost(message, str(path) if path else None) from cause

    def _save(self) -> tuple[str, Path | None]:
        """Save what survives; returns what became of it, and the path of the newest checkpoint."""
        for saver in self._savers():
            saver.close()  # what it writes is completed, or given up
        if self.run.context.config.trainer.fast_dev_run:
            return "trainer.fast_dev_run saves nothing", None
        store = Store(self.run.context.checkpoint_dir(self.state))
        latest = self._latest(store) if self.world.is_root else None
        latest = self.world.broadcast(latest, 0, "the last checkpoint")
        why = self._why_not()
        if not why:
            try:
                path = self._write(store)
                return f"the state of that step is saved in {path}{self._omission_text()}", path
            except CheckpointError as problem:
                why = str(problem)
        if latest is None:
            return f"{why}, and there is no checkpoint", None
        return f"{why}; the last checkpoint, of step {latest.step}, is {latest.path}", latest.path

    def _latest(self, store: Store) -> Entry | None:
        """The newest checkpoint in `store` that is of this run: of another one only if this one
        has begun with it."""
        run = run_before(store.directory)
        if run is None and self.run.context.config.checkpoint.resume == "auto":
            return store.latest()
        good = [entry for entry in store.entries() if entry.problem is None]
        if run is not None:
            return next((entry for entry in good if entry.run == run), None)
        saver = next(iter(self._savers()), None)
        return next((entry for entry in good if saver and saver.is_in_history(entry)), None)

    def _why_not(self) -> str:
        """Why nothing can be saved; empty if it can."""
        lost = self.grid.lost(member.stable_rank for member in self.world.members)
        if self._point is None or self._point.order[0] == 0:
            return "no update was finished"
        if lost:
            names = " and ".join(map(str, lost))
            return f"no copy of partition {names} has survived, so its state is lost"
        if self._point.update_invalid:
            return "that step had spoilt the model, so its state was not saved"
        return ""

    def _omission_text(self) -> str:
        """Names of metrics whose counts the checkpoint lacks, as the end of a sentence."""
        assert self._point is not None
        lost = {*self.grid.counting()} - {member.stable_rank for member in self.world.members}
        if not (lost and self._counts.omitted and self._point.progress["batch"]):
            return ""
        names = ", ".join(self._counts.omitted)
        return f", without what lost ranks had counted in the metrics {names} in this epoch"

    def _write(self, store: Store) -> Path:
        """Write the state of the last commit; all surviving ranks call this together."""
        assert self._point is not None
        point, world, model = self._point, self.world, self.model
        self._backup.undo()
        self.state.rollback = None  # asked for after that commit
        load_callback_states(self.run.every, point.states, point.arrays, model)
        model.stop_training = False
        writers = self.grid.writers(member.stable_rank for member in world.members)
        writes = writers[self._placement.partition] == world.stable_rank
        # A rank that writes does what the first replica does otherwise.
        place(model, replace(self._placement, replica=0 if writes else 1))
        progress = Progress.from_dict(point.progress)
        captured, state = capture(
            model,
            progress,
            world,
            callbacks=self.run.every,
            history=point.history,
            place=data_fingerprint(self.state.feed, self.run.context.config),
        )
        # What callbacks have written since the point, such as a log, is not of its state.
        state |= {"callbacks": point.states, "counting": self.grid.counting()}
        state["world_size"] = len(self.grid.places)
        if progress.batch:
            state["counted"] = self._counted_of_all()
        arrays = {k: v for k, v in captured.items() if not k.startswith("metrics/")}
        counted = self._states_of_all()
        if world.is_root and progress.batch:
            arrays |= states_of_ranks(model, counted)
        if self._data is not None:
            state["data_replicas"] = [0]
            arrays |= {data_name(0): np.frombuffer(self._data, np.uint8)} if world.is_root else {}
        names = names_to_save(model, arrays, state) if world.is_root else ()
        texts = model_text(model) if world.is_root else {}
        last = LastState(progress.step, arrays, names, state, self._facts(progress), texts)
        # Older ones stay: the next save of a run that saves by itself removes them.
        return write_last_checkpoint(world, store, self._placement, writes, last)

    def _states_of_all(self) -> dict[int, Sequence[np.ndarray]]:
        """The metrics' states of all ranks at the point, those of the lost ones included; zeros for
        these in metrics that have too many numbers to exchange after each update."""
        rows = self._counted[:, 2:]
        every: dict[int, Sequence[np.ndarray]] = {
            rank: self._counts.states(row) for rank, row in enumerate(rows)
        }
        if self._counts.omitted:
            here = (self.world.stable_rank, self._counts.states())
            every |= dict(self.world.allgather(here, "metric counts of each rank"))
        return every

    def _counted_of_all(self) -> list[list[Any]]:
        """Arguments of `MetricCounts.take_over`; ranks of a replica have the same logs."""
        assert self._point is not None
        mine = self._placement.replica, self._point.logs
        logs = dict(self.world.allgather(mine, "logs of replicas"))
        return [
            [int(self._counted[rank][0]), int(self._counted[rank][1]), logs.get(replica)]
            for rank, (_, replica) in sorted(self.grid.places.items())
        ]

    def _facts(self, progress: Progress) -> dict[str, Any]:
        """Facts of the run for the manifest, as they were before ranks were lost."""
        savers = self._savers()
        return {
            "epoch": progress.epoch,
            "batch": progress.batch,
            "world_size": len(self.grid.places),
            "replicas": self._placement.replicas,
            "partitions": self._placement.partitions,
            **(savers[0].run_facts(progress.step) if savers else {"run": ""}),
        }

    def _savers(self) -> list[Checkpoint]:
        return [c for c in self.run.every if isinstance(c, Checkpoint)]

    def _advice(self, path: Path | None) -> str:
        """How to resume, where no launcher does it."""
        if RECORDS in os.environ:
            return ""
        add = words_to_resume(self.run.context, self.state, path) if path else ""
        how = f" with {add}" if add else ""
        does = "resumes from there" if path else "starts afresh"
        return (
            f". Started again{how}, on as many processes, the run {does}; "
            "`ktrainer run --max-restarts N` starts it by itself"
        )
