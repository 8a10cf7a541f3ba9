"""`elastic.run`: a loop of one's own that continues when ranks are lost, and lets others join.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)

Under `ktrainer run --heal` the surviving ranks return to the last commit, and call the function
again; under `--replace` others join at a commit. The channels are opened again for the ranks that
there are, and compiled functions, which have them, read the number of ranks each time they run.
Without healing a function that is decorated runs as it is, after `state.sync()`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.config.launch_environment import launched_world
from ktrainer.dataparallel.calls import call_of
from ktrainer.dataparallel.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from ktrainer.dataparallel.elastic_states import (
    KerasState,
    ObjectState,
    State,
    TensorFlowKerasState,
    TensorFlowState,
)
from ktrainer.dataparallel.handlers import carry_out
from ktrainer.dataparallel.state import group_of, opened
from ktrainer.errors import PeerLost, WorldError, name_ranks

HorovodInternalError = PeerLost


class HostsUpdatedInterrupt(Exception):
    """A rank joins: `elastic.run` gives it the state, and calls the function again."""


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that trains, and continues from where its state says.

    The state gets the values of rank 0 first. Where ranks are lost, or the function raises
    HorovodInternalError, the state is restored to its last commit; and also where others join, its
    reset callbacks are called and all ranks, the new ones too, begin again with rank 0's state.

    Args:
        function: its first argument is a `State`. All collectives of the script belong into it,
            as does data that is divided among ranks; a joining rank runs the script from its
            beginning up to here.

    Returns:
        A function of the same arguments.

    Raises:
        PeerLost: ranks were lost, and there is no healing.
        WorldError: fewer ranks are left than `--min-n`, or none that has the state.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        if not opened().world.heals:
            state.sync()
            return function(state, *args, **kwargs)
        return _ElasticRun(state).finish(lambda: function(state, *args, **kwargs))

    return elastic


class _ElasticRun:
    """One call of a decorated function, on ranks that may be lost and join."""

    def __init__(self, state: State) -> None:
        from ktrainer.elastic.joining_policy import JoiningPolicy  # importing MPI starts it

        world: Any = opened().world
        self._state, self._world, config = state, world, launched_world()
        self._policy = JoiningPolicy(world, config)
        self._least = config.min_size
        self._has_state = not world.alone
        self._reset = False

    def finish(self, function: Callable[[], Any]) -> Any:
        """The result of a function that all ranks have called to its end."""
        from ktrainer.elastic.recovery_point import survivable_section

        if self._state._look_for_ranks is not None:
            raise WorldError("elastic.run was called in a function that it decorates itself.")
        if self._world.alone and not self._policy.enter():
            os._exit(0)  # no rank waits for it, and it has nothing to say
        self._state._look_for_ranks = self._look
        try:
            with survivable_section(self._world):
                while True:
                    loss: BaseException | None = None
                    try:
                        self._begin()
                        result = function()
                        self._world.agree("end of elastic.run")
                        return result
                    except HostsUpdatedInterrupt:
                        pass
                    except Exception as error:
                        if (loss := self._loss_in(error)) is None:
                            raise
                    # Outside of the handlers: there the loss would be any new error's context.
                    try:
                        self._change_ranks(loss)
                    finally:
                        loss = None  # its traceback has this frame: a cycle would keep both
        finally:
            self._state._look_for_ranks = None
            self._policy.close()

    def _begin(self) -> None:
        """Give all ranks the state of rank 0."""
        if self._reset:
            self._reset = False
            self._state.on_reset()
        mine = (self._has_state, self._policy.started)
        every = self._world.allgather(mine, "which ranks have the state")
        if not every[0][0]:  # joining ranks are the last
            raise WorldError("no surviving rank has the state of the training")
        self._policy.learn(every[0][1])
        if self._world.size < self._least:
            raise WorldError(
                f"surviving ranks: {self._world.size}, fewer than --min-n {self._least}. Commits "
                "are in memory: only what the script has saved in files is left."
            )
        self._state.updaters.clear()  # of a fit that an error has ended
        self._state.sync()
        self._has_state = True

    def _look(self) -> None:
        """Let a rank join that is ready."""
        row = np.array([self._policy.look(), self._policy.next_rank])
        call = call_of("commit, or check_host_updates", "run")
        ready, self._policy.next_rank = carry_out(
            group_of(None).others,
            call,
            lambda world: world.oob_allreduce(row, "max", str(call)),
        ).tolist()
        if ready:
            raise HostsUpdatedInterrupt

    def _loss_in(self, error: Exception) -> BaseException | None:
        """The lost rank, or the script's HorovodInternalError, in an error; None: another one."""
        found: list[BaseException] = [error]
        if isinstance(error, tf.errors.OpError):  # of a compiled function, which drops its cause
            group = group_of(None)
            kept = (group.gradients.error, group.others.error)
            found += [each for each in kept if each is not None]
        own = isinstance(error, HorovodInternalError) and self._world.interrupted_by is None
        if own:
            return error
        return next((each for each in found if self._world.has_lost(each)), None)

    def _change_ranks(self, error: BaseException | None) -> None:
        """Continue with the ranks that there are.

        Args:
            error: caused by a lost rank; None where a rank is to join.
        """
        began, before, lost, cause = time.perf_counter(), self._world.members, [], error
        while True:
            try:
                if cause is None:
                    self._policy.admit()
                else:
                    lost += self._world.heal()
                break
            except Exception as another:  # one more was lost meanwhile
                if not self._world.has_lost(another):
                    raise
                cause = another
        if error is not None:
            self._state.restore()
            for aggregation in opened().aggregations:
                aggregation.reset()
        self._reset = True
        if self._world.is_root:
            ranks = [before.index(each) if each in before else each.stable_rank for each in lost]
            _say(ranks, cause is None, self._world.size, time.perf_counter() - began)


def _say(lost: list[int], joined: bool, size: int, seconds: float) -> None:
    if lost:
        what = f"{name_ranks(lost)} {'was' if len(lost) == 1 else 'were'} lost"
    else:
        what = "a rank joined" if joined else "no rank was lost"
    ranks = "1 rank continues" if size == 1 else f"{size} ranks continue"
    where = "" if joined else " from the last commit"
    print(f"ktrainer: {what}; {ranks}{where} ({seconds:.2f} s)", file=sys.stderr, flush=True)


__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
