"""TensorFlow clusters: the ranks of a world with addresses that all of them know."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import closing
from typing import Any

import tensorflow as tf

from ktrainer.config.cluster_environment import ClusterSpec, slurm_cluster, tf_config
from ktrainer.config.launch_environment import LOOPBACK, NETWORK, listening_address
from ktrainer.distributed import World
from ktrainer.errors import WorldError

__all__ = ["ClusterSpec", "cluster_of", "resolver", "restore_environment"]

_made: ClusterSpec | None = None  # by this process, and left in TF_CONFIG


def cluster_of(world: World, environ: MutableMapping[str, str] = os.environ) -> ClusterSpec:
    """The cluster of the ranks of `world`: as TF_CONFIG says, or made of free ports.

    All ranks call it together. What is made is left in TF_CONFIG, where users' scripts and other
    libraries look for it, until `restore_environment`.

    Raises:
        WorldError: TF_CONFIG does not fit the ranks.
    """
    global _made
    if _made is None:
        found = tf_config(environ) or (slurm_cluster(environ) if world.name == "cluster" else None)
        if found is not None:
            _check_fits(found, world)
            return found
        _made = _of_free_ports(world)
    environ["TF_CONFIG"] = _made.as_json()
    return _made


def restore_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove a TF_CONFIG that `cluster_of` has set from the environment."""
    if _made is not None and environ.get("TF_CONFIG") == _made.as_json():
        del environ["TF_CONFIG"]


def resolver(cluster: ClusterSpec) -> Any:
    """A cluster as TensorFlow's resolver."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(tasks) for job, tasks in cluster.jobs.items()}),
        task_type=cluster.job,
        task_id=cluster.task,
        rpc_layer="grpc",
    )


def _of_free_ports(world: World) -> ClusterSpec:
    with closing(_free_port()) as held:
        port = held.getsockname()[1]
        host = _own_address(world)
        addresses = world.allgather(f"{host}:{port}", "addresses of the cluster")
    return ClusterSpec({"worker": tuple(addresses)}, "worker", world.rank)


def _own_address(world: World) -> str:
    """The address of this process for the others; of the loopback interface if all are here."""
    if world.local_size == world.size:
        return LOOPBACK
    return listening_address() if NETWORK in os.environ else socket.gethostname()


def _free_port() -> socket.socket:
    """A socket on a free port, which it holds while it is open."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _check_fits(cluster: ClusterSpec, world: World) -> None:
    known: Any = (len(cluster.workers), cluster.number if cluster.job != "ps" else None)
    if world.size > 1 and known != (world.size, world.rank):
        raise WorldError(
            f"TF_CONFIG names {known[0]} workers and calls this one number {known[1]}, but it is "
            f"rank {world.rank} of {world.size}. Unset TF_CONFIG, and the ranks make a cluster of "
            "their own, or start without MPI."
        )
