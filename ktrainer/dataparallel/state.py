"""`init` and `shutdown`: the ranks, and the channels of each process set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from ktrainer.config.launch_environment import launched_world
from ktrainer.dataparallel.local_variables import LocalVariables
from ktrainer.dataparallel.process_sets import ProcessSet, global_process_set
from ktrainer.dataparallel.rank_group import RankGroup
from ktrainer.distributed import World, current_world, is_open, open_world
from ktrainer.errors import DivergenceError, SetupError, WorldError
from ktrainer.runtime.autograph import exclude_from_autograph
from ktrainer.runtime.monkeypatching import Replacements
from ktrainer.runtime.symbol_check import check_symbols

if TYPE_CHECKING:
    from ktrainer.distributed.elastic_world import ElasticWorld

_DEADLINE = "the deadline, with init(deadline=SECONDS)"


@dataclass
class State:
    """The ranks and process sets that `init` opened."""

    world: World
    sets: list[ProcessSet]
    replaced: Replacements
    before: tuple[float, str] | None  # the world's deadline; None: it is not this module's to set
    places: list[int]  # the local rank of each rank
    local: LocalVariables = field(default_factory=LocalVariables)  # local sources of tapes
    next_id: int = 1
    ranks_changed: Callable[[], None] | None = None  # with healing, whenever ranks did
    aggregations: list[Any] = field(default_factory=list)  # the LocalAggregation of each optimizer


_state: State | None = None
_healing: World | None = None  # opened here, with healing


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    deadline: float | None = None,
) -> None:
    """Start communication among all processes. Call it once, on every rank, before all else.

    Args:
        comm: only None: all processes that the launcher started.
        process_sets: process sets to open; the same ones on every rank. "dynamic", with which
            Horovod allows to add some later, is always the case here.
        deadline: seconds that any wait for other ranks may last; default: 300.

    Raises:
        WorldError: it was called before.
        SetupError: the processes are not connected by MPI; Keras or TensorFlow is of a version
            that is not supported.
    """
    global _state
    if _state is not None:
        raise WorldError(
            "init was called more than once: ktrainer.dataparallel is already initialised. Call "
            "it once, at the top of the script; after shutdown() it may be called again."
        )
    if comm is not None:
        raise SetupError(
            "init(comm=...) is not supported: leave it out for all processes, and make a "
            "ProcessSet of the ranks that communicate among themselves."
        )
    check_symbols()
    exclude_from_autograph()
    allow_two_threads()
    world = _open_world()
    before = world.deadline, world.deadline_setting
    world.deadline_setting = _DEADLINE
    world.deadline = before[0] if deadline is None else deadline
    _state = _opened(world, before)
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(each)


def _open_world() -> World:
    """All processes; they heal if `ktrainer run` was told so, as `elastic.run` needs."""
    global _healing
    if is_open() and current_world() is not _healing:
        check_connected(current_world())
        return current_world()
    world = open_world(heal=launched_world().heal)
    _healing = world if world.heals else None
    return world


def open_over(world: World) -> None:
    """Start communication among some of the processes alone, as all that there are.

    Ranks, sizes and roots are those in it. Who calls it has checked the processes, as `init` does,
    and calls `shutdown`.

    Args:
        world: this process's group; all processes call this together.

    Raises:
        WorldError: `init` was called before.
    """
    global _state
    if _state is not None:
        raise WorldError("ktrainer.dataparallel is already initialised.")
    _state = _opened(world, None)


def _opened(world: World, before: tuple[float, str] | None) -> State:
    group = global_process_set.group = RankGroup(world)
    places = world.allgather(world.local_rank, "init")
    state = State(world, [global_process_set], Replacements(), before, places)
    if world.heals:

        def ranks_changed() -> None:
            group.ranks_changed()
            members = cast("ElasticWorld", world).members
            state.places = [member.local_rank for member in members]

        state.ranks_changed = ranks_changed
        cast("ElasticWorld", world).on_change.append(ranks_changed)
    return state


def shutdown() -> None:
    """End communication. Optional at the end of a script; `init` may be called again after it.

    All ranks call it together. Without `init` it does nothing.
    """
    global _state
    if _state is None:
        return
    state, _state = _state, None
    state.replaced.close()
    if state.ranks_changed is not None:
        cast("ElasticWorld", state.world).on_change.remove(state.ranks_changed)
    usable = state.world.interrupted_by is None
    if usable:
        state.world.barrier("shutdown")
    for each in state.sets:
        if usable and each.group is not None:
            each.group.close()
        each.group = None
        each.process_set_id = None if each is not global_process_set else 0
    if state.before is not None:
        state.world.deadline, state.world.deadline_setting = state.before


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not."""
    return _state is not None


def opened() -> State:
    """The ranks and process sets that `init` opened.

    Raises:
        WorldError: it was not called.
    """
    if _state is None:
        raise WorldError(
            "ktrainer.dataparallel is not initialised: call its init() first, at the top of the "
            "script, on every rank."
        )
    return _state


def group_of(process_set: ProcessSet | None) -> RankGroup:
    """The communicators of a process set that this process is in; None: of all ranks.

    Raises:
        WorldError: `init` was not called, the set was not added, or this rank is not in it.
    """
    opened()
    return (global_process_set if process_set is None else process_set).members()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Open a process set. All ranks call it, in the same order, also those not in it.

    Raises:
        WorldError: it is open already, or names ranks that do not exist.
        DivergenceError: ranks name different ones.
    """
    state = opened()
    if state.world.heals:
        raise WorldError(
            "process sets are not available with `ktrainer run --heal`: the ranks that they name "
            "may be lost. Start without --heal, or use all ranks."
        )
    if state.before is None and state.world.size > 1:
        raise WorldError(
            "process sets are not available after smp.init(horovod=True): collectives act over the "
            "replicas of a stage. Use smp.broadcast, smp.allgather and smp.CommGroup for others."
        )
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks, size = made.ranks or [], state.world.size
    every = state.world.allgather(ranks, "add_process_set")
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            raise DivergenceError(
                f"ranks add different process sets: rank 0 one of ranks {every[0]}, rank {rank} "
                f"one of {theirs}. Every rank must add the same sets in the same order."
            )
    known = [each.opened().ranks for each in state.sets]
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < size:
        raise WorldError(f"a process set needs different ranks from 0 to {size - 1}, not {ranks}.")
    if made.group is not None or ranks in known:
        raise WorldError(f"{made} is open already; use the one that was added before.")
    made.group, made.process_set_id = RankGroup(state.world, ranks), state.next_id
    state.next_id += 1
    state.sets.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set that was added. All ranks call it together.

    Returns:
        Whether it was open; that of all ranks cannot be removed.
    """
    state = opened()
    if process_set is global_process_set or process_set not in state.sets:
        return False
    state.world.barrier("remove_process_set")
    process_set.opened().close()
    process_set.group = process_set.process_set_id = None
    state.sets.remove(process_set)
    return True


def check_connected(world: World) -> None:
    """Refuse processes that MPI does not connect."""
    if world.heals or (world.size > 1 and world.name != "mpi"):
        what = "with healing by a Trainer" if world.heals else f"by {world.name}, without MPI"
        raise SetupError(
            f"ktrainer.dataparallel communicates over MPI, but these processes were connected "
            f"{what}. Start the script with `ktrainer run`, mpirun or srun; with --heal only for a "
            "script that calls ktrainer.dataparallel's init and no Trainer."
        )


def allow_two_threads() -> None:
    """Let a collective of gradients and another one wait at the same time, on one core too."""
    threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    if threads < 2:
        try:
            tf.config.threading.set_inter_op_parallelism_threads(2)
        except RuntimeError:
            raise SetupError(
                "TensorFlow runs with one thread for operations already; collectives need two. "
                "Call init() before TensorFlow is used, or set "
                "tf.config.threading.set_inter_op_parallelism_threads(2) first."
            ) from None
