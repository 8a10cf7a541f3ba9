"""TensorFlow's own TPUStrategy, with CPU devices where the cores of a TPU would be.

A TPU's program is traced once for all replicas, which learn their numbers as it runs. Here all of
that is TensorFlow's: `TPUStrategy.run`, its replica context, its variables, how it merges and
reduces. Only what needs the hardware is replaced:

    tpu.replicate           traces the program once, as ever, but calls it on each CPU device
    TPUReplicateContext     gives the variables of the first replica while it is traced; they are
                            exchanged for those of each device when the program is called
    cross_replica_sum       is a collective of the CPU devices

So this shows that one program, traced once, gives the numbers; not that a TPU's compiler takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import tpu_strategy, tpu_util
from tensorflow.python.framework import ops
from tensorflow.python.ops import collective_ops

_GROUP, _COLLECTIVES = 4711, count(7_000_000)  # apart from those of other strategies


class Resolver:
    """A TPU of `cores` on this host, as a cluster resolver would find it."""

    def __init__(self, cores: int) -> None:
        names = [f"/job:localhost/replica:0/task:0/device:TPU:{i}" for i in range(cores)]
        self.metadata = SimpleNamespace(
            devices=[SimpleNamespace(name=name) for name in names],
            num_cores=cores,
            num_hosts=1,
            num_of_cores_per_host=cores,
        )

    def get_tpu_system_metadata(self) -> Any:
        return self.metadata


def tpu_strategy_on_cpus(cores: int) -> tf.distribute.TPUStrategy:
    """A TPUStrategy whose cores are the logical CPU devices of this process."""
    strategy = tf.distribute.TPUStrategy(Resolver(cores))
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(cores)]
    strategy.extended._tpu_devices = np.array([[name] for name in names], object)
    strategy._enable_packed_variable_in_eager_mode = False
    return strategy


class Traces:
    """The programs that were traced.

    Attributes:
        count: how many.
        numbers: what each was told its replica's number is.
    """

    def __init__(self) -> None:
        self.count = 0
        self.numbers: list[tf.Tensor] = []


@contextmanager
def on_cpus(strategy: tf.distribute.TPUStrategy, xla: bool = False) -> Iterator[Traces]:
    """Run the programs of `strategy` on CPU devices.

    Args:
        strategy: from `tpu_strategy_on_cpus`.
        xla: compile them with XLA, where CPUs cannot sum: sums are then wrong.
    """
    devices = [row[0] for row in strategy.extended._tpu_devices]
    traces = Traces()
    tracing: list[_Program] = []

    def replicate(computation: Any, inputs: Sequence[Any], **_: Any) -> list[Any]:
        traces.count += 1
        program = _Program(computation, inputs[0], tracing, xla)
        return [
            program(part, i, device)
            for i, (part, device) in enumerate(zip(inputs, devices, strict=True))
        ]

    def enclosing() -> Any:
        return tracing[-1] if tracing else None

    def summed(value: Any, *_: Any, **__: Any) -> tf.Tensor:
        if xla:
            return tf.identity(value)
        return collective_ops.all_reduce_v2(
            tf.convert_to_tensor(value),
            len(devices),
            _GROUP + len(devices),
            next(_COLLECTIVES),
            "Add",
            "Id",
        )

    original = tpu_strategy._TPUReplicaContext.__init__

    def init(self: Any, strategy: Any, replica_id_in_sync_group: Any = 0) -> None:
        traces.numbers.append(replica_id_in_sync_group)
        original(self, strategy, replica_id_in_sync_group)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (tpu_strategy.tpu, "replicate", replicate),
            (tpu_strategy.tpu_ops, "cross_replica_sum", summed),
            (tpu_util, "enclosing_tpu_context", enclosing),
            (tpu_strategy._TPUReplicaContext, "__init__", init),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield traces


class _Program:
    """A computation, traced once, for calls on several devices; a TPU's context meanwhile."""

    def __init__(self, computation: Any, example: Any, tracing: list[_Program], xla: bool) -> None:
        self._variables: dict[int, list[Any]] = {}  # by the id of the first replica's handle
        flat = [x for x in tf.nest.flatten(example) if x is not None]

        def on_leaves(*leaves: Any) -> Any:
            rest = iter(leaves)
            whole = [None if x is None else next(rest) for x in tf.nest.flatten(example)]
            result = computation(*tf.nest.pack_sequence_as(example, whole))
            return tf.nest.map_structure(
                lambda x: x if x is None else tf.convert_to_tensor(x), result
            )

        tracing.append(self)
        try:
            function = tf.function(on_leaves, autograph=False, jit_compile=xla or None)
            self._function = function.get_concrete_function(*[_any_rows(x) for x in flat])
        finally:
            tracing.pop()

    def get_replicated_var_handle(
        self, name: str, key: str, variables: Sequence[Any], mirrored: bool, packed: bool
    ) -> Any:
        assert not packed
        with ops.init_scope():
            handles = [variable.handle for variable in variables]
        self._variables[id(handles[0])] = handles
        return handles[0]

    def __call__(self, inputs: Any, number: int, device: str) -> Any:
        """The program's outputs as the replica `number` on `device`."""
        flat = [tf.convert_to_tensor(x) for x in tf.nest.flatten(inputs) if x is not None]
        captured = [
            self._variables[id(x)][number] if id(x) in self._variables else x
            for x in self._function.captured_inputs
        ]
        with tf.device(device):
            return self._function._call_flat(flat, captured)


def _any_rows(leaf: Any) -> tf.TensorSpec:
    leaf = tf.convert_to_tensor(leaf)
    shape = leaf.shape if leaf.shape.rank == 0 else [None, *leaf.shape[1:]]
    return tf.TensorSpec(shape, leaf.dtype)
