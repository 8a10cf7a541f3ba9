"""`init` and `shutdown`: the ranks, their groups, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ktrainer.data.rank_consistency import check_consistency
from ktrainer.dataparallel import state as dataparallel
from ktrainer.distributed import SingleWorld, World, current_world, is_open, open_world
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import ConfigError, WorldError
from ktrainer.modelparallel.settings import Settings, settings_of
from ktrainer.runtime.autograph import exclude_from_autograph
from ktrainer.runtime.symbol_check import check_symbols

_DEADLINE = "the deadline, with init(config, deadline=SECONDS)"


class CommGroup(Enum):
    """The ranks that take part in a call: all, those of this replica, or of this stage."""

    WORLD = "world"
    MP_GROUP = "mp_group"
    DP_GROUP = "dp_group"


class RankType(Enum):
    """The ranks among which a number counts: all ranks, those of this replica, or of this stage."""

    WORLD_RANK = "world"
    MP_RANK = "mp_group"
    DP_RANK = "dp_group"


@dataclass
class State:
    """The ranks and settings that `init` opened.

    Attributes:
        settings: of the script.
        world: all ranks.
        mp: the stages of this replica, in order: the rank in it is the stage.
        dp: the copies of this stage, in the order of replicas.
        layout: which rank has which stage of which replica.
    """

    settings: Settings
    world: World
    mp: World
    dp: World
    layout: Layout
    before: tuple[float, str]

    def group(self, which: CommGroup | RankType) -> World:
        """The ranks of one of the three groups."""
        return {"world": self.world, "mp_group": self.mp, "dp_group": self.dp}[which.value]


_state: State | None = None
_forgetting: list[Callable[[], None]] = []


def init(config: Mapping[str, Any] | None = None, *, deadline: float | None = None) -> None:
    """Start communication among all processes. Call it once, on every rank, before all else.

    With `horovod=True` the functions of `ktrainer.dataparallel` act over the copies of this rank's
    stage from then on; its own `init` must not be called.

    Args:
        config: `partitions` and the other keys of `Settings`; the same on every rank.
        deadline: seconds that any wait for other ranks may last; default: 300.

    Raises:
        WorldError: it was called before, or ktrainer.dataparallel was initialised before it.
        ConfigError: a key or a value is wrong.
        DivergenceError: ranks were given different values.
        SetupError: the processes are not connected by MPI.
    """
    global _state
    if _state is not None:
        raise WorldError(
            "init was called more than once: ktrainer.modelparallel is already initialised. Call "
            "it once, at the top of the script; after shutdown() it may be called again."
        )
    check_symbols()
    exclude_from_autograph()
    world = current_world() if is_open() else open_world()
    settings = settings_of(config, world.size)
    if settings.horovod and dataparallel.is_initialized():
        raise WorldError(
            "ktrainer.dataparallel is already initialised, over all ranks: with horovod=True "
            "smp.init does that itself, over the replicas. Leave out its init()."
        )
    dataparallel.check_connected(world)
    dataparallel.allow_two_threads()
    before = world.deadline, world.deadline_setting
    world.deadline_setting = _DEADLINE
    world.deadline = before[0] if deadline is None else deadline
    check_consistency(world, config=asdict(settings))
    _state = _opened(settings, world, before)
    if settings.horovod:
        dataparallel.open_over(_state.dp)


def _opened(settings: Settings, world: World, before: tuple[float, str]) -> State:
    replicas = world.size // settings.partitions
    layout = Layout(settings.partitions, replicas, settings.placement_strategy)
    mp: Any = SingleWorld()
    dp: Any = SingleWorld()
    if world.size > 1:
        replica, stage = layout.replica_of(world.rank), layout.partition_of(world.rank)
        both: Any = world
        mp = both.group(layout.model_ranks(replica), f"the stages of replica {replica}")
        dp = both.group(layout.copy_ranks(stage), f"the copies of stage {stage}")
    return State(settings, world, mp, dp, layout, before)


def at_shutdown(forget: Callable[[], None]) -> None:
    """Have a function called whenever communication ends: what a module keeps ends with it."""
    _forgetting.append(forget)


def shutdown() -> None:
    """End communication. Optional at the end of a script; `init` may be called again after it.

    All ranks call it together. Without `init` it does nothing.
    """
    global _state
    if _state is None:
        return
    for forget in _forgetting:
        forget()
    state, _state = _state, None
    if state.settings.horovod:
        dataparallel.shutdown()
    if state.world.interrupted_by is None:
        state.world.barrier("smp.shutdown")
        state.mp.close()
        state.dp.close()
    state.world.deadline, state.world.deadline_setting = state.before


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not."""
    return _state is not None


def current() -> State:
    """The ranks and settings that `init` opened.

    Raises:
        ConfigError: it was not called.
    """
    if _state is None:
        raise ConfigError(
            "ktrainer.modelparallel is not initialised: call smp.init first, at the top of the "
            'script, on every rank: smp.init({"partitions": 2})'
        )
    return _state


def size() -> int:
    """The number of processes."""
    return current().world.size


def rank() -> int:
    """This process's number among all processes."""
    return current().world.rank


def local_size() -> int:
    """The number of processes on this node."""
    return current().world.local_size


def local_rank() -> int:
    """This process's number among those on its node."""
    return current().world.local_rank


def mp_size() -> int:
    """The number of processes that hold one replica of the model: `partitions`."""
    return current().mp.size


def mp_rank() -> int:
    """This process's number among those of its replica: its stage."""
    return current().mp.rank


def dp_size() -> int:
    """The number of replicas of the model."""
    return current().dp.size


def dp_rank() -> int:
    """This process's replica, by which its script takes its part of the data."""
    return current().dp.rank


def get_mp_group() -> list[int]:
    """The ranks of this process's replica, in the order of stages."""
    state = current()
    return state.layout.model_ranks(state.layout.replica_of(state.world.rank))


def get_dp_group() -> list[int]:
    """The ranks that hold copies of this process's stage, in the order of replicas."""
    state = current()
    return state.layout.copy_ranks(state.layout.partition_of(state.world.rank))


pp_size, pp_rank = mp_size, mp_rank  # without tensor parallelism they are the same
