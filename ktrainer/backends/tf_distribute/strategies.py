"""Strategies from the configuration, each made once per process.

TensorFlow numbers its collectives by strategy object, so that a second strategy of the same
devices would reuse the first one's numbers and fail. Strategies are therefore kept.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ktrainer.backends.tf_distribute.clusters import ClusterSpec, resolver
from ktrainer.config import TfDistributeConfig
from ktrainer.errors import SetupError
from ktrainer.plan.strategy_plan import StrategyPlan
from ktrainer.runtime.monkeypatching import replaced

HEARTBEAT_SECONDS = 8.0  # without which a process counts as lost

_made: dict[Any, tf.distribute.Strategy] = {}


def open_strategy(
    backend: TfDistributeConfig,
    plan: StrategyPlan,
    cluster: ClusterSpec | None = None,
    timeout: float | None = None,
) -> tf.distribute.Strategy:
    """The strategy that the configuration asks for, the same object whenever it asks again.

    Args:
        backend: the configuration's section.
        plan: its devices.
        cluster: the processes of a strategy that has several.
        timeout: seconds that a sum over processes may take, if it is made now.
    """
    # Not the timeout of a sum: a step's sums are given theirs one by one.
    key = (
        plan,
        backend.cross_device_ops,
        backend.communication,
        backend.bytes_per_pack,
        backend.min_shard_bytes,
        backend.tpu,
    )
    if key not in _made:
        _made[key] = _make(backend, plan, cluster, timeout)
    return _made[key]


def make_devices(plan: StrategyPlan) -> None:
    """Cut the CPU into as many logical devices as the plan names; before TensorFlow runs.

    Raises:
        SetupError: TensorFlow is running, with fewer.
    """
    if not plan.logical:
        return
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    present = tf.config.get_logical_device_configuration(cpu)
    if present is not None and len(present) >= plan.logical:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * plan.logical
        )
    except RuntimeError as error:
        raise SetupError(
            f"TensorFlow was already using the CPU as one device when the Trainer was made, and "
            f"backend.devices needs {plan.logical}. Make the Trainer first, then the model and the "
            "data; and the one with most devices before the others."
        ) from error


def communication_options(backend: TfDistributeConfig, timeout: float | None) -> Any:
    """TensorFlow's options for sums over replicas.

    At the timeout TensorFlow frees the operation while its sum is still under way, and sometimes
    crashes: `BaseCollectiveExecutor::ExecuteAsync` in `core/common_runtime`. Without a timeout a
    sum would wait for ever.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    kind = {"auto": kinds.AUTO, "ring": kinds.RING, "nccl": kinds.NCCL}[backend.communication]
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=backend.bytes_per_pack, timeout_seconds=timeout, implementation=kind
    )


def _make(
    backend: TfDistributeConfig,
    plan: StrategyPlan,
    cluster: ClusterSpec | None,
    timeout: float | None,
) -> tf.distribute.Strategy:
    devices = [f"/device:{name}" for name in plan.devices]
    distribute = tf.distribute
    if plan.strategy == "default":
        return distribute.get_strategy()
    if plan.strategy == "one_device":
        return distribute.OneDeviceStrategy(devices[0])
    if plan.strategy == "mirrored":
        return distribute.MirroredStrategy(devices, _cross_device_ops(backend, plan))
    if plan.strategy == "central_storage":
        return distribute.experimental.CentralStorageStrategy(devices, "/device:CPU:0")
    if plan.strategy == "tpu":
        return _tpu(backend)
    assert cluster is not None
    if plan.strategy == "multi_worker_mirrored":
        return _multi_worker(plan, cluster, communication_options(backend, timeout))
    return _parameter_server(cluster, backend.min_shard_bytes)


def _cross_device_ops(backend: TfDistributeConfig, plan: StrategyPlan) -> Any:
    """TensorFlow's sum over the devices of one process."""
    name = backend.cross_device_ops
    if name == "auto":
        name = "nccl" if plan.devices[0].startswith("GPU") else "reduction_to_one_device"
    if name == "nccl":
        return tf.distribute.NcclAllReduce()
    if name == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce()
    return tf.distribute.ReductionToOneDevice()


def _multi_worker(plan: StrategyPlan, cluster: ClusterSpec, options: Any) -> tf.distribute.Strategy:
    """MultiWorkerMirroredStrategy over `plan.devices` of every process.

    TensorFlow takes all GPUs, or one CPU; the device list is ours.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy as implementation

    kind = plan.devices[0][:3]
    _watch_heartbeats(cluster)

    def local_devices(_: Any, __: Any, worker: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker}/device:{name}" for name in plan.devices), kind

    extended = implementation.CollectiveAllReduceExtended
    # Two strategies of a process that number their collectives alike would mix them up.
    keys = (implementation.CollectiveAllReduceStrategy, "_collective_key_base", 1000 * len(_made))
    try:
        with replaced((extended, "_initialize_local_devices", local_devices), keys):
            return tf.distribute.MultiWorkerMirroredStrategy(resolver(cluster), options)
    except RuntimeError as error:
        raise SetupError(
            f"TensorFlow was already running when the Trainer was made ({error}), and can no "
            "longer be connected to the other processes. Make the Trainer first, then the model "
            "and the data."
        ) from error


def _parameter_server(cluster: ClusterSpec, min_shard_bytes: int | None) -> tf.distribute.Strategy:
    """The coordinator's ParameterServerStrategy, once all processes of `cluster` are connected.

    Args:
        min_shard_bytes: larger variables are sharded over the servers; None shards none.
    """
    partitioner = None
    if min_shard_bytes is not None:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes, max_shards=len(cluster.jobs["ps"])
        )
    return tf.distribute.ParameterServerStrategy(resolver(cluster), partitioner)


def _watch_heartbeats(cluster: ClusterSpec) -> None:
    """Make sums fail that wait for a process without a heartbeat."""
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    if context.context().coordination_service is not None:
        return
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(cluster.jobs[job]))
        for job in ("chief", "worker")
        if job in cluster.jobs
    ]
    leader = "chief" if "chief" in cluster.jobs else "worker"
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        heartbeat_timeout_in_ms=int(HEARTBEAT_SECONDS * 1000),
        coordinated_jobs=jobs,
    )


def _tpu(backend: TfDistributeConfig) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=backend.tpu)
    if backend.tpu != "local":
        tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
