"""Elastic training: the surviving ranks continue, and new ranks join."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ktrainer.callbacks import Checkpoint
from ktrainer.callbacks.base import emit, overrides
from ktrainer.callbacks.csv_log import cut_logs_of_keras
from ktrainer.checkpoint.contents.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.contents.capture_state import history_of, named_variables
from ktrainer.checkpoint.contents.unsaved_variables import warn_of_unsaved
from ktrainer.checkpoint.restore_run import fill_history
from ktrainer.data.local_batch import LocalBatch, first_rows
from ktrainer.data.rank_consistency import (
    model_facts,
    named_facts,
    require_same_facts,
    without_order,
)
from ktrainer.distributed.elastic_members import Member
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.elastic.joining_policy import JoiningPolicy
from ktrainer.elastic.recovery_point import (
    MetricCountsRow,
    RecoveryPoint,
    VariableBackup,
    survivable_section,
)
from ktrainer.errors import PeerLost, WorldError
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Phase, Progress
from ktrainer.state.time_shares import HEALING
from ktrainer.state.train_state import Healed
from ktrainer.steps.named_variables import attribute_variables
from ktrainer.steps.variable_broadcast import broadcast_variables
from ktrainer.training.fit_settings import versions_that_compute
from ktrainer.training.loop_state import LoopModel

if TYPE_CHECKING:
    from ktrainer.training.recovery_protocol import ResumableLoop
    from ktrainer.training.run import Run

_WARM_UP_ROWS = 8
_EPOCH, _EXAMPLES, _COUNTS = 0, 1, 2  # columns of a rank's row; all that follow are counts
_BEFORE_UPDATES = {"on_epoch_begin", "on_step_begin", "on_train_batch_begin", "on_batch_begin"}


class _Joined(Exception):
    """A rank has joined: all return to the last commit, whose state it receives."""


class ElasticRecovery:
    """Keeps one `fit` alive while data-parallel ranks are lost and join.

    Args:
        run: its feeds and callbacks are made again for each new set of ranks.
        world: the ranks.
    """

    def __init__(self, run: Run, world: ElasticWorld) -> None:
        self.run, self.state, self.world = run, run.state, world
        self.model = run.model
        self._config = run.context.config
        self._point = RecoveryPoint()
        self._backup = VariableBackup(self.model, updates_in_parts(run))
        self._counts = MetricCountsRow(self.model, only_sums=True)
        # At the point: epoch (-1: none), and this rank's examples and counts in it.
        self._mine = np.array([-1.0, 0.0])
        self._table: dict[int, np.ndarray] = {}  # those of all, by stable rank, as last exchanged
        self._joining_policy = JoiningPolicy(world, self._config.world)
        self._facts = _facts_of(run)
        self._checked = False  # at the variables that an update assigns

    def updates(self, loop: ResumableLoop) -> Generator[Any, Any, keras.callbacks.History]:
        """Yield all updates to the end; as a joining rank, from where the others are. An update
        that a lost rank interrupts comes again."""
        if self.world.alone:
            self._warm_up()
            if not self._joining_policy.enter():
                os._exit(0)  # no rank waits for it, and it has nothing to say
            self._recover(loop, None)
        else:
            loop.begin()
            self.commit(Phase.CALLBACKS_DONE, self.state.counted.logs)
            self._exchange_counts()
        with survivable_section(self.world):
            while True:
                loss: Exception | None = None
                try:
                    history = yield from loop.updates()
                    self.world.agree("end of training")
                    return history
                except _Joined:
                    pass
                except Exception as error:
                    if not self.world.has_lost(error):
                        raise
                    loss = error
                # Outside of the handlers: there the loss would be any new error's context.
                try:
                    self._recover(loop, loss)
                finally:
                    loss = None  # its traceback has this frame: a cycle would keep both

    # -- called by the loop

    def begin_step(self) -> None:
        """Prepare for an update that may be interrupted."""
        with self.state.times.of(HEALING):
            self._backup.begin_step()

    def commit(
        self, phase: Phase, logs: Any = None, callbacks_up_to: tuple[int, int] | None = None
    ) -> None:
        """Make the present the moment that ranks can return to.

        Args:
            phase: how much of the last update is over.
            logs: its logs; None: those of the commit before, which is of the same update.
            callbacks_up_to: step and batch up to which all callbacks have run; None: as the phase
                says.
        """
        state, progress, context = self.state, self.state.progress, self.run.context
        if callbacks_up_to is None:
            now = (progress.step, progress.batch)
            callbacks_up_to = self._point.callbacks_up_to if phase == Phase.UPDATED else now
        with state.times.of(HEALING):
            states, arrays = callback_states(self.run.callbacks.callbacks, self.model)
            self._point = RecoveryPoint(
                phase=phase,
                progress=progress.to_dict(),
                callbacks_up_to=callbacks_up_to,
                logs=self._point.logs if logs is None else MetricCounts(logs=logs).plain_logs(),
                history=history_of(self.model),
                states=copy.deepcopy(states),
                arrays=arrays,
                stopped=state.stopped,
                out_of_time=state.out_of_time,
                update_invalid=state.update_invalid,
                started=self._joining_policy.started,
                run_dir=None if self._config.trainer.fast_dev_run else str(context.run_dir),
                shuffle_order=state.feed.shuffle_order,
                lengths=self.run.feeds.lengths,
                facts=self._facts,
            )
            counted = [_counted_epoch(progress), float(state.counted.examples)]
            self._mine = np.concatenate([counted, self._counts.row()])
            self._backup.keep()
        if phase == Phase.UPDATED and not self._checked:
            self._checked = True
            if self.world.is_root:
                callbacks = self.run.callbacks.callbacks
                warn_of_unsaved(self.model, state.program.graphs, callbacks)

    def vote(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The maximum over ranks of each of `flags` (int32); the ranks also exchange their metric
        counts. Joining ranks that are ready are admitted here, after an update.

        Raises:
            _Joined: on all ranks, when one has come in.
        """
        ready = self._point.phase == Phase.UPDATED and self._joining_policy.look()
        joining = [float(ready), float(self._joining_policy.next_rank)]
        row = np.concatenate([flags.astype(np.float64), joining, self._mine])
        table = self.world.gather_rows(row, what)
        self._keep_counts(table[:, flags.size + 2 :])
        self._joining_policy.next_rank = int(table[:, flags.size + 1].max())
        agreed = table[:, : flags.size].max(axis=0).astype(np.int32)
        if table[:, flags.size].any():
            self._joining_policy.admit()
            raise _Joined
        return agreed

    def close(self) -> None:
        """Start no more joining ranks."""
        self._joining_policy.close()

    # -- changes of the ranks

    def _warm_up(self) -> None:
        """Compile the step by running it, while the others train; the weights are replaced."""
        with closing(self.state.feed.epoch(0)) as batches:
            first = list(islice(batches, self._config.trainer.accumulate))
        if first:  # of the whole batch, as this process is alone: a few rows will do
            few = [min(each.examples, _WARM_UP_ROWS) for each in first]
            rows = [first_rows(each.batch, n) for each, n in zip(first, few, strict=True)]
            self.state.program.train([LocalBatch(b, n, n) for b, n in zip(rows, few, strict=True)])

    def _recover(self, loop: ResumableLoop, error: Exception | None) -> None:
        """Continue with the present set of ranks.

        Args:
            error: caused here by a lost rank; None where a rank has joined.
        """
        began, lost = time.perf_counter(), list[Member]()
        before, cause = self.world.members, error
        while True:
            try:
                with self.state.times.of(HEALING):
                    if cause is not None:
                        lost += self.world.heal()
                    healed = self._restore_furthest(loop, [member.stable_rank for member in lost])
                break
            except Exception as another:  # one more was lost meanwhile
                if not self.world.has_lost(another):
                    raise
                cause = another
        ranks = tuple(_rank_in(before, member) for member in lost)
        seconds = time.perf_counter() - began
        size, joined = self.world.size, cause is None
        self.state.healed.append(Healed(healed, ranks, size, seconds, joined))
        if self.world.is_root:
            _say(self.state.healed[-1], self._counts.omitted)
        least = self._config.world.min_size
        if cause is not None and size < least:
            self._save_and_end(least, cause)

    def _restore_furthest(self, loop: ResumableLoop, lost: list[int]) -> int:
        """Bring all ranks to the furthest point of any, and divide the work among them.

        Args:
            lost: stable ranks of those that were lost.

        Returns:
            The step of that point.
        """
        orders = self.world.allgather(self._point.order, "which rank is furthest")
        furthest, mine = max(orders), self._point.order
        if furthest[0] < 0:
            raise WorldError("no surviving rank has the state of the training")
        donor = orders.index(furthest)
        point: RecoveryPoint = self.world.broadcast(self._point, donor, "the furthest point")
        if mine == furthest:
            point = replace(point, logs=self._point.logs)
        if self.state.joining:
            require_same_facts(self._facts, point.facts)
        self._backup.undo()
        self.state.program.abandon()
        self._backup.keep()  # a hand-over that fails is undone too
        if any(order < furthest for order in orders):
            broadcast_variables(named_variables(self.model), self.world, donor)
            self._broadcast_attributes(donor, lags=mine < furthest)
        self._restore_counts(lost, _counted_epoch(Progress.from_dict(point.progress)))
        self._restore_run(loop, point)
        self.commit(point.phase, point.logs, callbacks_up_to=point.callbacks_up_to)
        if self.world.is_root:  # it has their counts; if it is lost, too, the next one adds them
            self._table = {rank: row for rank, row in self._table.items() if rank not in lost}
        self._exchange_counts()
        return point.order[0]

    def _broadcast_attributes(self, donor: int, lags: bool) -> None:
        """Give a rank that lags the donor's `attribute_variables`. The other ranks keep theirs,
        and each rank its random generators."""
        named = {n: v for n, v in attribute_variables(self.model, False) if not v.of_generator}
        values = {name: variable.numpy() for name, variable in named.items()}
        received = self.world.broadcast(values, donor, "attributes of the furthest rank")
        if lags:
            for name in named.keys() & received.keys():
                named[name].assign(received[name])

    def _exchange_counts(self) -> None:
        """Tell the other ranks what this one has counted, for them to take over."""
        self._keep_counts(self.world.gather_rows(self._mine, "metric counts of each rank"))

    def _keep_counts(self, table: np.ndarray) -> None:
        self._table = {
            member.stable_rank: row for member, row in zip(self.world.members, table, strict=True)
        }

    def _restore_counts(self, lost: list[int], epoch: float) -> None:
        """This rank's own counts; the first rank takes over those of the lost ranks.

        Not known are the counts of an update that a rank, or its message, did not complete; nor
        are those of the omitted metrics.

        Args:
            lost: stable ranks of those that were lost.
            epoch: the one whose counts are to be restored; -1: none. A rank that missed its first
                update, or was lost before all had exchanged their counts of that, has another's.
        """
        # These weigh the metrics that do not add up, which lack what lost ranks had counted.
        self.state.counted.examples = 0
        if epoch < 0 or self._mine[_EPOCH] != epoch:
            self.model.reset_metrics()
        else:
            self.state.counted.examples = int(self._mine[_EXAMPLES])
        if epoch < 0:
            return
        rows = [self._table[rank] for rank in lost if rank in self._table]
        rows = [row for row in rows if row[_EPOCH] == epoch]
        if self.world.is_root and rows:
            self._counts.add(np.sum(rows, axis=0)[_COUNTS:])

    def _restore_run(self, loop: ResumableLoop, point: RecoveryPoint) -> None:
        """Bring the callbacks, the data and the loop to `point`, for the present ranks."""
        run, state = self.run, self.state
        state.progress = Progress.from_dict(point.progress)
        self._joining_policy.learn(point.started)
        run.ranks_changed(point.run_dir, point.shuffle_order, point.lengths)
        state.rollback = None  # callbacks that asked for it are called again
        load_callback_states(run.callbacks.callbacks, point.states, point.arrays, self.model)
        cut_logs_of_keras(run.callbacks.callbacks, resumed=True)  # rows since come again
        fill_history(getattr(self.model, "history", None), {"history": point.history})
        # What a callback of this rank has asked for since the last vote; not before it joined.
        asked = bool(self.model.stop_training) and not (state.stopped or state.joining)
        self.model.stop_training = point.stopped or asked
        state.stopped, state.out_of_time = point.stopped, point.out_of_time
        state.update_invalid = point.update_invalid
        progress = loop.resume_at(point.phase, point.logs, point.callbacks_up_to)
        state.joining = False
        emit(run.callbacks.callbacks, "on_heal", progress)

    def _save_and_end(self, least: int, error: BaseException) -> None:
        saved = None
        for callback in self.run.callbacks.callbacks:
            if isinstance(callback, Checkpoint):
                if callback.save(self._point.logs):
                    saved = callback.directory
                callback.wait()
        where = f"their state is saved in {saved}" if saved else "no checkpoint was saved"
        raise PeerLost(
            f"surviving ranks after step {self._point.order[0]}: {self.world.size}, fewer than "
            f"world.min_size={least}; {where}"
        ) from error


def _facts_of(run: Run) -> dict[str, str]:
    """Facts that a joining rank must share with the ranks that train: script, configuration or
    files may have been edited since they began."""
    model = {} if isinstance(run.model, LoopModel) else model_facts(run.model, rates=False)
    config = run.call.facts()
    del config["run"]["dir"]  # sent to joining ranks, as is the order of the data
    data = without_order(run.state.data_facts)
    return named_facts(config, model, data, versions_that_compute())


def _counted_epoch(progress: Progress) -> float:
    """The epoch of which metrics hold counts; -1 before its first update, which resets them."""
    return float(progress.epoch) if progress.batch else -1.0


def updates_in_parts(run: Run) -> bool:
    """Whether one call may change weights in parts: more than one update, or more than one
    optimizer; statistics, which ranks average once the weights are updated; a loop of the user's
    own, which may communicate after its update. Or a user's callback may change some before it."""
    config, model = run.context.config.trainer, run.model
    stock = type(model).train_step is keras.Model.train_step and not isinstance(model, LoopModel)
    statistics = [v for v in model.non_trainable_variables if "seed" not in v.name]
    several = config.accumulate > 1 or config.asks_for_several_steps
    return not stock or several or bool(statistics) or any(map(_acts_before_updates, run.every))


def _acts_before_updates(callback: Any) -> bool:
    """Whether a user's callback has an event that comes before an update."""
    if type(callback).__module__.partition(".")[0] in ("keras", "ktrainer"):
        return not _BEFORE_UPDATES.isdisjoint(vars(callback))  # as of Keras' LambdaCallback
    return any(overrides(callback, event) for event in _BEFORE_UPDATES)


def _rank_in(members: list[Member], member: Member) -> int:
    """The rank that a process had, or its stable rank if it joined later."""
    return members.index(member) if member in members else member.stable_rank


def _say(healed: Healed, omitted: list[str]) -> None:
    whose = "their" if healed.lost else "a rank's"
    more = f"; the training metrics of this epoch may lack {whose} part of one update"
    if healed.lost and omitted:
        more += f", and {', '.join(omitted)} all of their part"
    ranks = "1 rank continues" if healed.size == 1 else f"{healed.size} ranks continue"
    print(
        f"ktrainer: {healed.what}; {ranks} after step {healed.step} ({healed.seconds:.2f} s)"
        f"{'' if healed.joined else more}",
        file=sys.stderr,
        flush=True,
    )
