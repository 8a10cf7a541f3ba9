"""Hybrid runs: when ranks die, the replicas that are left save the state of all, just in time.

Replicas of a partition hold the same state, so that of a dead rank is still there as long as a
copy of its partition lives. The ranks that are left go back to the last update that all of them
have finished, write a checkpoint of it, each partition by its first copy, and end. The next start,
for which `ktrainer run --max-restarts` sees, goes on from there: however long ago the last
checkpoint was, no more is lost than the update under way. Where a partition has no copy left, the
next start goes on from the last checkpoint.

From Gupta et al., "Just-In-Time Checkpointing: Low Cost Error Recovery from Deep Learning Training
Failures" (EuroSys 2024), which takes a rank's state from a replica in the same way. There the ranks
that wait for a dead one save what they hold, each by itself; here they agree first on which update
it is, and write one checkpoint like any other, for any number of partitions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from ktrainer.checkpoint.callback import Checkpoint
from ktrainer.checkpoint.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.metric_state import states_of_ranks
from ktrainer.checkpoint.snapshot import model_text
from ktrainer.checkpoint.state import capture, history_of, names_to_save
from ktrainer.checkpoint.store import Entry, Store
from ktrainer.errors import CheckpointError, RanksDied
from ktrainer.going_on import to_add
from ktrainer.healing.counts import Counts
from ktrainer.healing.parts import healing_part
from ktrainer.healing.point import Point
from ktrainer.healing.rollback import Rollback
from ktrainer.healing.saving import Grid, LastState, write_together
from ktrainer.progress import Phase, Progress
from ktrainer.restarted import MEMORY, run_before
from ktrainer.steps.placement import Placement, place
from ktrainer.world.healing import HealingWorld

if TYPE_CHECKING:
    from ktrainer.fit import Fit
    from ktrainer.loop import Loop


class JustInTime:
    """Runs a loop to its end, or to the death of a rank, and saves what is left then.

    The moment to go back to moves once all callbacks have heard of an update, on all ranks at once
    (`HealingWorld.agree`): so all that are left always have the same one, whatever part of a later
    update some of them have applied. It does not move to a step at which training ends: what
    follows that step would be lost.

    Args:
        fit: its callbacks, and where it saves.
        loop: what it runs.
        world: the ranks.
        placement: who holds what of the model.
    """

    def __init__(self, fit: Fit, loop: Loop, world: HealingWorld, placement: Placement) -> None:
        self.fit, self.loop, self.world = fit, loop, world
        self.model, self._placement = fit.model, placement
        here = placement.partition, placement.replica
        self.grid = Grid(dict(enumerate(world.allgather(here, "who has which partition"))))
        self._rollback = Rollback(self.model, several=True)
        self._counts = Counts(self.model)
        self._told = np.zeros((world.size, 0))  # what each rank has counted, as last told
        self._counted = self._told  # the same, at the point
        self._point: Point | None = None

    def run(self) -> keras.callbacks.History:
        """Train to the end.

        Raises:
            RanksDied: on all that are left; it says what became of the state.
        """
        with healing_part(self.world):
            try:
                self.loop.begin()
                self.highest(np.zeros(0, np.int32), "what each rank has counted")
                self.mark(Phase.TOLD)
                history = self.loop.go_on()
                self.world.agree("end of training")
                return history
            except Exception as error:
                if not self.world.has_lost(error):
                    raise
                self._end(error)

    # -- what the loop tells

    def step_begins(self) -> None:
        """An update is about to be computed; everything is kept as it is now."""

    def mark(self, phase: Phase, logs: Any = None) -> None:
        """The present is a moment to go back to, if callbacks have heard of the update and there is
        another one to come.

        Raises:
            PeerLost: on all ranks, which are then to go back to the one before.
        """
        ends = self.model.stop_training or self.loop.late or self.loop.steps_left == 0
        if phase == Phase.UPDATED or ends:
            return
        states, arrays = callback_states(self.fit.every, self.model, held=True)
        point = Point(
            phase=phase,
            progress=self.fit.trainer.progress.to_dict(),
            history=history_of(self.model),
            states=copy.deepcopy(states),
            arrays=arrays,
            logs=self.fit.trainer.counted.plain_logs(),
            unsound=self.fit.trainer.unsound,
        )
        self.world.agree("a finished update")
        self._point, self._counted = point, self._told
        self._rollback.keep()

    def highest(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The greatest of each of `flags` (int32) of all ranks, who also tell what each has
        counted."""
        counted = self.fit.trainer.counted
        examples = [float(counted.examples), float(counted.last)]
        row = np.concatenate([flags.astype(np.float64), examples, self._counts.row()])
        table = self.world.gather_rows(row, what)
        self._told = table[:, flags.size :]
        agreed: np.ndarray = table[:, : flags.size].max(axis=0).astype(np.int32)
        return agreed

    def close(self) -> None:
        """Nothing is held."""

    # -- after a death

    def _end(self, error: Exception) -> NoReturn:
        lost, cause = list[int](), error
        while True:
            try:
                lost += [peer.slot for peer in self.world.heal()]
                text, path = self._save()
                break
            except Exception as another:  # one more died meanwhile
                if not self.world.has_lost(another):
                    raise
                cause = another
        who = " and ".join(self.grid.name(rank) for rank in sorted(lost))
        step = self._point.order[0] if self._point is not None else 0
        told = f"{who} died after step {step}: {text}{self._advice(path)}"
        raise RanksDied(told, str(path) if path else None) from cause

    def _save(self) -> tuple[str, Path | None]:
        """Save what is left; returns what became of it, and the path of the newest checkpoint."""
        for saver in self._savers():
            saver.close()  # what it writes is completed, or given up
        if self.fit.trainer.config.trainer.fast_dev_run:
            return "trainer.fast_dev_run saves nothing", None
        store = Store(self.fit.trainer.checkpoint_dir)
        latest = self._latest(store) if self.world.is_root else None
        latest = self.world.broadcast(latest, 0, "the last checkpoint")
        why = self._why_not()
        if not why:
            try:
                path = self._write(store)
                return f"the state of that step is saved in {path}", path
            except CheckpointError as problem:
                why = str(problem)
        if latest is None:
            return f"{why}, and there is no checkpoint", None
        return f"{why}; the last checkpoint, of step {latest.step}, is {latest.path}", latest.path

    def _latest(self, store: Store) -> Entry | None:
        """The newest checkpoint in `store` that is of this run: of another one only if this one
        has begun with it."""
        run = run_before(store.directory)
        if run is None and self.fit.trainer.config.checkpoint.resume == "auto":
            return store.latest()
        if run is None:
            run = next((saver.run_facts(0)["run"] for saver in self._savers()), None)
        good = (entry for entry in store.entries() if entry.problem is None)
        return next((entry for entry in good if entry.run == run), None)

    def _why_not(self) -> str:
        """Why nothing can be saved; empty if it can."""
        lost = self.grid.lost(peer.slot for peer in self.world.peers)
        if self._point is None or self._point.order[0] == 0:
            return "no update was finished"
        if lost:
            names = " and ".join(map(str, lost))
            return f"no copy of partition {names} is left, so its state is lost"
        if self._point.unsound:
            return "that step had spoilt the model, so its state was not saved"
        return ""

    def _write(self, store: Store) -> Path:
        """Write the state of the last point; all that are left call it together."""
        assert self._point is not None
        point, world, model = self._point, self.world, self.model
        self._rollback.undo()
        load_callback_states(self.fit.every, point.states, point.arrays, model)
        model.stop_training = False
        writers = self.grid.writers(peer.slot for peer in world.peers)
        writes = writers[self._placement.partition] == world.slot
        # Whoever writes is now what the first replica is otherwise.
        place(model, replace(self._placement, replica=0 if writes else 1))
        progress = Progress.from_dict(point.progress)
        captured, state = capture(
            model,
            progress,
            world,
            callbacks=self.fit.every,
            history=point.history,
            place=self.fit.place_facts(),
        )
        state |= {"world_size": len(self.grid.places), "counting": self.grid.counting()}
        if progress.batch:
            state["counted"] = self._counted_of_all()
        arrays = {k: v for k, v in captured.items() if not k.startswith("metrics/")}
        counted = self._states_of_all()
        if world.is_root and progress.batch:
            arrays |= states_of_ranks(model, counted)
        names = names_to_save(model, arrays, state) if world.is_root else ()
        texts = model_text(model) if world.is_root else {}
        last = LastState(progress.step, arrays, names, state, self._facts(progress), texts)
        # Older ones stay: the next save of a run that saves by itself removes them.
        return write_together(world, store, self._placement, writes, last)

    def _states_of_all(self) -> dict[int, Sequence[np.ndarray]]:
        """The metrics' states of all ranks at the point, the dead ones' included. Where they are
        too many to be told after each update, the dead have counted nothing."""
        if self._counts.told:
            rows = self._counted[:, 2:]
            return {rank: self._counts.states(row) for rank, row in enumerate(rows)}
        mine = self._counts.states()
        told = self.world.allgather((self.world.slot, mine), "what each rank has counted")
        nothing = [np.zeros_like(state) for state in mine]
        return {**dict.fromkeys(self.grid.places, nothing), **dict(told)}

    def _counted_of_all(self) -> list[list[Any]]:
        """What `Counted.take_over` wants of all ranks at the point; the ranks of a replica have the
        same logs."""
        assert self._point is not None
        mine = self._placement.replica, self._point.logs
        logs = dict(self.world.allgather(mine, "logs of replicas"))
        return [
            [int(self._counted[rank][0]), int(self._counted[rank][1]), logs.get(replica)]
            for rank, (_, replica) in sorted(self.grid.places.items())
        ]

    def _facts(self, progress: Progress) -> dict[str, Any]:
        """What the manifest says of the run, as it was before anybody died."""
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
        return [c for c in self.fit.every if isinstance(c, Checkpoint)]

    def _advice(self, path: Path | None) -> str:
        """How to go on, if nobody does it."""
        if MEMORY in os.environ:
            return ""
        add = to_add(self.fit.trainer, path) if path else ""
        how = f" with {add}" if add else ""
        does = "goes on from there" if path else "begins anew"
        return (
            f". Started again{how}, on as many processes, the run {does}; "
            "`ktrainer run --max-restarts N` starts it by itself"
        )
