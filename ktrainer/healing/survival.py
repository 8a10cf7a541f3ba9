"""Runs a loop to its end, whoever dies or comes on the way."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ktrainer.callbacks import Checkpoint
from ktrainer.callbacks.base import as_floats, emit
from ktrainer.callbacks.broadcast import broadcast_variables
from ktrainer.checkpoint.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.state import history_of, variables_of
from ktrainer.errors import DataError, PeerLost
from ktrainer.healing.counts import Counts
from ktrainer.healing.point import Point
from ktrainer.healing.recruiting import Recruiting
from ktrainer.healing.rollback import Rollback
from ktrainer.progress import Phase, Progress
from ktrainer.world.healing import HealingWorld, is_loss

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


class _Joined(Exception):
    """A newcomer is in: all ranks go back to the last point, which it is given."""


class Survival:
    """Keeps one `fit` going.

    Args:
        fit: whose feeds and callbacks are made for the ranks of the moment.
        loop: what it runs.
        world: the ranks.

    Raises:
        DataError: data that is gone once it was read.
    """

    def __init__(self, fit: Fit, loop: Loop, world: HealingWorld) -> None:
        _check_data(fit)
        self.fit, self.loop, self.world = fit, loop, world
        self.model = fit.model
        self._point = Point()
        self._rollback = Rollback(self.model, _several(fit))
        self._counts = Counts(self.model)
        self._mine = np.zeros(0)  # this rank's counts at the point
        self._table = np.zeros((world.size, 0))  # those of all ranks, as last told
        self._recruiting = Recruiting(world, fit.trainer.config.world, fit.trainer.fits)

    def run(self) -> keras.callbacks.History:
        """Train to the end; as a newcomer, from where the others are."""
        if self.world.alone:
            self._enter()
        else:
            self.loop.begin()
            self.mark(Phase.TOLD)
        while True:
            try:
                return self.loop.go_on()
            except _Joined:
                self._resume(lost=(), began=time.perf_counter())
            except BaseException as error:
                if not (is_loss(error) or (self.world.broken and isinstance(error, PeerLost))):
                    raise
                self._heal(error)

    # -- what the loop tells

    def step_begins(self) -> None:
        """An update is about to be computed."""
        self._rollback.step_begins()

    def mark(self, phase: Phase, logs: Any = None) -> None:
        """The present is a moment to go back to."""
        trainer = self.fit.trainer
        states, arrays = callback_states(self._stateful(), self.model)
        self._point = Point(
            phase=phase,
            progress=trainer.progress.to_dict(),
            logs=as_floats(logs),
            history=history_of(self.model),
            states=states,
            arrays=arrays,
            stop=bool(self.model.stop_training),
            late=self.loop.late,
            validated=self.loop.validated,
            started=self._recruiting.started,
            run_dir=None if trainer.config.trainer.fast_dev_run else str(trainer.run_dir),
            seed=getattr(self.fit.feed, "seed", trainer.config.seed),
        )
        self._mine = np.concatenate([[float(self.loop.examples)], self._counts.row()])
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
        self._table = table[:, flags.size + 1 :]
        agreed = table[:, : flags.size].max(axis=0).astype(np.int32)
        if table[:, flags.size].any() and self._recruiting.admit():
            raise _Joined
        return agreed

    def close(self) -> None:
        """Nobody is wanted any more."""
        self._recruiting.close()

    # -- changes of the ranks

    def _enter(self) -> None:
        """Become a rank; without one to become, end this process quietly."""
        self._warm_up()
        if not self._recruiting.enter():
            raise SystemExit(0)
        self._resume(lost=(), began=time.perf_counter())

    def _warm_up(self) -> None:
        """Compile the step by running it, while the others train; the weights are replaced."""
        with closing(self.fit.feed.epoch(0)) as shares:  # type: ignore[type-var]
            first = list(islice(shares, self.fit.trainer.config.trainer.accumulate))
        if first:
            self.fit.program.train(first)

    def _heal(self, error: BaseException) -> None:
        began = time.perf_counter()
        lost: tuple[int, ...] = ()
        while True:
            try:
                lost += tuple(self.world.heal())
                self._resume(lost, began)
                break
            except BaseException as another:  # one more died meanwhile
                if not (is_loss(another) or self.world.broken):
                    raise
        least = self.fit.trainer.config.world.min_size
        if self.world.size < least:
            self._save_and_end(least, error)

    def _resume(self, lost: tuple[int, ...], began: float) -> None:
        """Bring all ranks to the furthest point of any, and cut the work anew."""
        orders = self.world.allgather(self._point.order, "who is furthest")
        furthest = max(orders)
        donor = orders.index(furthest)
        point: Point = self.world.broadcast(self._point, donor, "the furthest point")
        self._rollback.undo()
        self.fit.program.abandon()
        if any(order[0] < furthest[0] for order in orders):
            named = variables_of(self.model)
            broadcast_variables(named, self.world, donor)
        self._take_counts(lost, behind=self._point.order[0] < furthest[0])
        self._take(point)
        self._table = np.zeros((self.world.size, 0))
        self.mark(point.phase, point.logs)
        seconds = time.perf_counter() - began
        healed = Healed(point.order[0], lost, self.world.size, seconds)
        self.fit.trainer.healed.append(healed)
        if self.world.is_root:
            _say(healed)

    def _take_counts(self, lost: tuple[int, ...], behind: bool) -> None:
        """This rank's own counts; the first rank takes over those of the dead.

        What a rank had counted in an update that it, or its message, did not live to complete is
        not known to anybody.
        """
        mine = self._mine if self._mine.size else np.zeros(1)
        dead = [self._table[r] for r in lost if r < len(self._table) and self._table[r].size]
        if self.world.is_root and dead:
            mine = mine + np.sum(dead, axis=0)
        self.loop.examples = int(mine[0])
        if self._counts.told and mine.size > 1:
            self._counts.assign(mine[1:])
        elif behind:
            self.model.reset_metrics()

    def _take(self, point: Point) -> None:
        """Make the callbacks, the data and the loop those of `point`, for the ranks of now."""
        trainer = self.fit.trainer
        trainer.progress = Progress.from_dict(point.progress)
        self._recruiting.started = point.started
        self.fit.follow(point.run_dir, point.seed)
        load_callback_states(self._stateful(), point.states, point.arrays, self.model)
        history = getattr(self.model, "history", None)
        if history is not None:
            history.epoch = list(point.history["epoch"])
            history.history = {k: list(v) for k, v in point.history["history"].items()}
        self.model.stop_training = point.stop
        told = self.loop.take_up(
            self.fit.feed,
            self.fit.validation,
            late=point.late,
            validated=point.validated,
            untold=point.logs if point.phase == Phase.UPDATED else None,
        )
        trainer.joining = False
        emit(self.fit.callbacks.callbacks, "on_heal", told)

    def _save_and_end(self, least: int, error: BaseException) -> None:
        saved = None
        for callback in self.fit.callbacks.callbacks:
            if isinstance(callback, Checkpoint):
                callback.save(self._point.logs)
                callback.wait()
                saved = callback.directory
        where = f"their state is saved in {saved}" if saved else "checkpoints are off"
        raise PeerLost(
            f"{self.world.size} ranks are left after step {self._point.order[0]}, fewer than "
            f"world.min_size={least}; {where}"
        ) from error

    def _stateful(self) -> list[Any]:
        """All callbacks of the run, those of other ranks too: the first rank may be another
        later."""
        return self.fit.every


def _check_data(fit: Fit) -> None:
    """An interrupted epoch is read again up to where it stood."""
    for feed in (fit.feed, fit.validation):
        source = getattr(feed, "source", None)
        if source is not None and not source.reopens:
            raise DataError(
                "world.heal=true needs data that can be read again, which a generator cannot: pass "
                "the function that makes it, arrays, a PyDataset or a tf.data.Dataset"
            )


def _several(fit: Fit) -> bool:
    """Whether one call may change weights in parts: more than one update, or more than one
    optimizer; or statistics, which ranks average once the weights are updated."""
    config, model = fit.trainer.config.trainer, fit.model
    stock = type(model).train_step is keras.Model.train_step
    statistics = [v for v in model.non_trainable_variables if "seed" not in v.name]
    return not stock or config.steps_per_call > 1 or config.accumulate > 1 or bool(statistics)


def _say(healed: Healed) -> None:
    who = ", ".join(map(str, healed.lost))
    gone = f"rank{'s' * (len(healed.lost) > 1)} {who} died; " if healed.lost else "a rank joined; "
    ranks = "rank goes" if healed.size == 1 else "ranks go"
    print(
        f"ktrainer: {gone}{healed.size} {ranks} on after step {healed.step} "
        f"({healed.seconds:.2f} s)",
        file=sys.stderr,
        flush=True,
    )
