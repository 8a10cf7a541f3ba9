"""Numbers of ranks, and facts about this build."""

from __future__ import annotations

import os

import tensorflow as tf

from ktrainer.config.launch_environment import JOINED_SIZE
from ktrainer.dataparallel.host_calls import ranks_now
from ktrainer.dataparallel.process_sets import ProcessSet, global_process_set
from ktrainer.dataparallel.state import State, group_of, opened
from ktrainer.errors import ModelError


def size() -> int:
    """The number of processes; before a process has joined others, that with it."""
    world = _now("size").world
    return int(os.environ[JOINED_SIZE]) if world.alone else world.size


def rank() -> int:
    """This process's number among all processes; before it has joined others, the last one."""
    world = _now("rank").world
    return size() - 1 if world.alone else world.rank


def local_size() -> int:
    """The number of processes on this node."""
    return _now("local_size").world.local_size


def local_rank() -> int:
    """This process's number among those on its node."""
    return opened().world.local_rank


def cross_size() -> int:
    """The number of nodes that have a process of this local rank."""
    return len(_same_place())


def cross_rank() -> int:
    """This node's number among those that have a process of this local rank."""
    return _same_place().index(rank())


def _now(name: str) -> State:
    """The ranks of now.

    Raises:
        ModelError: a compiled function would keep what may change.
    """
    state = opened()
    if state.world.heals and tf.inside_function():
        instead = f"{name}_op()" if name in ("rank", "size") else "a tf.Variable"
        raise ModelError(
            f"{name}() in a compiled function is a constant, which would be wrong after ranks were "
            f"lost or have joined (`ktrainer run --heal`). Use {instead}, or call it outside."
        )
    return state


def _same_place() -> list[int]:
    places = _now("cross_rank").places
    return [k for k, place in enumerate(places) if place == local_rank()]


def is_homogeneous() -> bool:
    """Return whether every node has the same number of processes."""
    places = _now("is_homogeneous").places
    return len({places.count(place) for place in places}) == 1


def size_op(process_set: ProcessSet | None = None, name: str | None = None) -> tf.Tensor:
    """`size`, or that of a process set, as an int32 tensor."""
    group = (global_process_set if process_set is None else process_set).opened()
    return tf.convert_to_tensor(ranks_now(group)[1], tf.int32, name=name or "size")


def rank_op(name: str | None = None) -> tf.Tensor:
    """`rank` as an int32 tensor."""
    return tf.convert_to_tensor(ranks_now(group_of(None))[0], tf.int32, name=name or "rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """`local_size` as an int32 tensor."""
    return tf.constant(local_size(), tf.int32, name=name or "local_size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """`local_rank` as an int32 tensor."""
    return tf.constant(local_rank(), tf.int32, name=name or "local_rank")


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two, as Adasum needs."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def mpi_built(verbose: bool = False) -> bool:
    """True: messages travel over MPI."""
    return True


def mpi_enabled() -> bool:
    """Return whether MPI connects these processes; a single one needs none."""
    return opened().world.name == "mpi"


def mpi_threads_supported() -> bool:
    """True: `init` refuses an MPI that several threads may not use."""
    opened()
    return True


def _no(verbose: bool = False) -> bool:
    """False: this engine does not use it. (`backend.engine=horovod` of the Trainer does.)"""
    return False


gloo_built = gloo_enabled = nccl_built = ccl_built = ddl_built = cuda_built = rocm_built = _no
