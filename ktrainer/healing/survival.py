"""Runs a loop to its end, whoever dies or comes on the way."""

from __future__ import annotations

import copy
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ktrainer.callbacks import Checkpoint
from ktrainer.callbacks.base import emit
from ktrainer.callbacks.broadcast import broadcast_variables
from ktrainer.checkpoint.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.resuming import fill_history
from ktrainer.checkpoint.state import history_of, variables_of
from ktrainer.counted import Counted
from ktrainer.errors import PeerLost, WorldError, name_ranks
from ktrainer.feed.share import Share
from ktrainer.feed.source import take_slice
from ktrainer.healing.checks import changes_in_parts, check_callbacks, check_data
from ktrainer.healing.counts import Counts
from ktrainer.healing.parts import healing_part
from ktrainer.healing.point import Point
from ktrainer.healing.recruiting import Recruiting
from ktrainer.healing.rollback import Rollback
from ktrainer.progress import Phase, Progress
from ktrainer.steps.metric_states import unadded_metrics
from ktrainer.world.healing import HealingWorld
from ktrainer.world.peers import Peer

if TYPE_CHECKING:
    from ktrainer.fit import Fit
    from ktrainer.loop import Loop


@dataclass(frozen=True)
class Healed:
    """One change of the ranks.

    Attributes:
        step: the last update that counts; the next is done by the ranks of now.
        lost: the ranks, as they were, that died.
        size: how many ranks there are now.
        seconds: from the moment this rank noticed, until it went on.
    """

    step: int
    lost: tuple[int, ...]
    size: int
    seconds: float


_WARM_UP_ROWS = 8


class _Joined(Exception):
    """A newcomer is in: all ranks go back to the last point, which it is given."""


class Survival:
    """Keeps one `fit` going.

    Args:
        fit: whose feeds and callbacks are made for the ranks of the moment.
        loop: what it runs.
        world: the ranks.

    Raises:
        DataError: data that is gone once it was read, or cannot be read again in the same order.
        ConfigError: a callback that cannot move to another rank.
    """

    def __init__(self, fit: Fit, loop: Loop, world: HealingWorld) -> None:
        check_data(fit)
        check_callbacks(fit.every)
        self.fit, self.loop, self.world = fit, loop, world
        self.model = fit.model
        self._point = Point()
        self._rollback = Rollback(self.model, changes_in_parts(fit))
        self._counts = Counts(self.model)
        self._adds_up = not unadded_metrics(self.model)
        self._mine = np.zeros(0)  # this rank's counts at the point
        self._table: dict[int, np.ndarray] = {}  # those of all slots, as last told
        self._recruiting = Recruiting(world, fit.trainer.config.world)

    def run(self) -> keras.callbacks.History:
        """Train to the end; as a newcomer, from where the others are."""
        if self.world.alone:
            self._warm_up()
            if not self._recruiting.enter():
                os._exit(0)  # nobody waits for it, and it has nothing to say
            self._mend(None)
        else:
            self.loop.begin()
            self.mark(Phase.TOLD, self.fit.trainer.counted.logs)
            self._tell_counts()
        with healing_part(self.world):
            return self._train()

    def _train(self) -> keras.callbacks.History:
        while True:
            try:
                history = self.loop.go_on()
                self.world.agree("end of training")
                return history
            except _Joined:
                self._mend(None)
            except Exception as error:
                if not self.world.has_lost(error):
                    raise
                self._mend(error)

    # -- what the loop tells

    def step_begins(self) -> None:
        """An update is about to be computed."""
        self._rollback.step_begins()

    def mark(self, phase: Phase, logs: Any = None, told: tuple[int, int] | None = None) -> None:
        """The present is a moment to go back to.

        Args:
            phase: what is over of the last update.
            logs: its logs; default: those of the moment before, which is of the same update.
            told: step and batch up to which callbacks have heard; default: as it follows.
        """
        trainer, progress = self.fit.trainer, self.fit.trainer.progress
        if told is None:
            told = self._point.told if phase == Phase.UPDATED else (progress.step, progress.batch)
        states, arrays = callback_states(self.fit.callbacks.callbacks, self.model)
        self._point = Point(
            phase=phase,
            progress=progress.to_dict(),
            told=told,
            logs=self._point.logs if logs is None else Counted(logs=logs).plain_logs(),
            history=history_of(self.model),
            states=copy.deepcopy(states),
            arrays=arrays,
            stop=bool(self.model.stop_training),
            late=self.loop.late,
            unsound=trainer.unsound,
            started=self._recruiting.started,
            run_dir=None if trainer.config.trainer.fast_dev_run else str(trainer.run_dir),
            shuffle_order=self.fit.feed.shuffle_order,
        )
        self._mine = np.concatenate([[float(trainer.counted.examples)], self._counts.row()])
        self._rollback.keep()

    def highest(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The greatest of each of `flags` (int32) of all ranks, who also tell what each has
        counted. Newcomers that are ready are let in here, after an update.

        Raises:
            _Joined: on all ranks, when one has come in.
        """
        ready = self._point.phase == Phase.UPDATED and self._recruiting.look()
        row = np.concatenate([flags.astype(np.float64), [float(ready)], self._mine])
        table = self.world.gather_rows(row, what)
        self._keep_counts(table[:, flags.size + 1 :])
        agreed = table[:, : flags.size].max(axis=0).astype(np.int32)
        if table[:, flags.size].any():
            self._recruiting.admit()
            raise _Joined
        return agreed

    def close(self) -> None:
        """Nobody is wanted any more."""
        self._recruiting.close()

    # -- changes of the ranks

    def _warm_up(self) -> None:
        """Compile the step by running it, while the others train; the weights are replaced."""
        with closing(self.fit.feed.epoch(0)) as shares:  # type: ignore[type-var]
            first = list(islice(shares, self.fit.trainer.config.trainer.accumulate))
        if first:  # of the whole batch, as this process is alone: a few rows will do
            few = [min(share.examples, _WARM_UP_ROWS) for share in first]
            rows = [take_slice(share.batch, n, 0, 1) for share, n in zip(first, few, strict=True)]
            self.fit.program.train([Share(b, n, n) for b, n in zip(rows, few, strict=True)])

    def _mend(self, error: Exception | None) -> None:
        """Go on with the ranks of now.

        Args:
            error: what a death has caused here; None where a newcomer has come.
        """
        began, lost = time.perf_counter(), list[Peer]()
        before, cause = self.world.peers, error
        while True:
            try:
                if cause is not None:
                    lost += self.world.heal()
                self._resume(began, [p.slot for p in lost], [_rank_in(before, p) for p in lost])
                break
            except Exception as another:  # one more died meanwhile
                if not self.world.has_lost(another):
                    raise
                cause = another
        least = self.fit.trainer.config.world.min_size
        if cause is not None and self.world.size < least:
            self._save_and_end(least, cause)

    def _resume(self, began: float, slots: list[int], ranks: list[int]) -> None:
        """Bring all ranks to the furthest point of any, and cut the work anew.

        Args:
            began: when this rank noticed.
            slots, ranks: of those that died; ranks as they were.
        """
        orders = self.world.allgather(self._point.order, "who is furthest")
        furthest, mine = max(orders), self._point.order
        if furthest[0] < 0:
            raise WorldError("no rank is left that has the state of the training")
        donor = orders.index(furthest)
        point: Point = self.world.broadcast(self._point, donor, "the furthest point")
        if mine == furthest:
            point = replace(point, logs=self._point.logs)
        self._rollback.undo()
        self.fit.program.abandon()
        self._rollback.keep()  # a hand-over that fails is undone too
        if any(order < furthest for order in orders):
            broadcast_variables(variables_of(self.model), self.world, donor)
        self._take_counts(slots, new=mine[0] < 0)
        self._take(point)
        self.mark(point.phase, point.logs, told=point.told)
        self._tell_counts()
        seconds = time.perf_counter() - began
        healed = Healed(point.order[0], tuple(ranks), self.world.size, seconds)
        self.fit.trainer.healed.append(healed)
        if self.world.is_root:
            _say(healed)

    def _tell_counts(self) -> None:
        """What each rank has counted, for the others to take over."""
        self._keep_counts(self.world.gather_rows(self._mine, "what each rank has counted"))

    def _keep_counts(self, table: np.ndarray) -> None:
        self._table = {peer.slot: row for peer, row in zip(self.world.peers, table, strict=True)}

    def _take_counts(self, lost: list[int], new: bool) -> None:
        """This rank's own counts; the first rank takes over those of the dead.

        What a rank had counted in an update that it, or its message, did not live to complete is
        not known to anybody; so are states that do not add up.

        Args:
            lost: slots of the dead.
            new: this rank has counted nothing yet.
        """
        if new:
            self.model.reset_metrics()
            self._mine = np.concatenate([[0.0], self._counts.row()])
        mine = self._mine
        dead = [self._table[slot] for slot in lost if slot in self._table]
        if self.world.is_root and dead and self._adds_up:
            mine = mine + np.sum(dead, axis=0)
        self.fit.trainer.counted.examples = int(mine[0])
        if self._counts.told:
            self._counts.assign(mine[1:])

    def _take(self, point: Point) -> None:
        """Make the callbacks, the data and the loop those of `point`, for the ranks of now."""
        trainer = self.fit.trainer
        trainer.progress = Progress.from_dict(point.progress)
        self._recruiting.learn(point.started)
        self.fit.follow(point.run_dir, point.shuffle_order)
        load_callback_states(self.fit.callbacks.callbacks, point.states, point.arrays, self.model)
        fill_history(getattr(self.model, "history", None), {"history": point.history})
        self.model.stop_training, trainer.unsound = point.stop, point.unsound
        told = self.loop.take_up(
            self.fit.feed,
            self.fit.validation,
            late=point.late,
            phase=point.phase,
            logs=point.logs,
            told=point.told,
        )
        trainer.joining = False
        emit(self.fit.callbacks.callbacks, "on_heal", told)

    def _save_and_end(self, least: int, error: BaseException) -> None:
        saved = None
        for callback in self.fit.callbacks.callbacks:
            if isinstance(callback, Checkpoint):
                if callback.save(self._point.logs):
                    saved = callback.directory
                callback.wait()
        where = f"their state is saved in {saved}" if saved else "no checkpoint was saved"
        raise PeerLost(
            f"{self.world.size} ranks are left after step {self._point.order[0]}, fewer than "
            f"world.min_size={least}; {where}"
        ) from error


def _rank_in(peers: list[Peer], peer: Peer) -> int:
    """The rank that a process had, or its slot if it came later."""
    return peers.index(peer) if peer in peers else peer.slot


def _say(healed: Healed) -> None:
    gone = f"{name_ranks(healed.lost)} died; " if healed.lost else "a rank joined; "
    ranks = "rank goes" if healed.size == 1 else "ranks go"
    print(
        f"ktrainer: {gone}{healed.size} {ranks} on after step {healed.step} "
        f"({healed.seconds:.2f} s)",
        file=sys.stderr,
        flush=True,
    )
