"""A training loop of the user's own on several ranks, each with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ktrainer.backends.user_loop import ReduceOp, UserLoop, wide_type
from ktrainer.data.batch_specs import any_rows
from ktrainer.data.distributed_dataset import DistributedDataset, compare_datasets, require_dataset
from ktrainer.data.local_batch import LocalBatch
from ktrainer.distributed.collectives import GradientCollectives, InOrder
from ktrainer.distributed.world import World
from ktrainer.errors import ConfigError, ModelError
from ktrainer.steps.assertions import assert_in_graph
from ktrainer.steps.assigned_variables import concatenated, split_like
from ktrainer.steps.loop_step import LoopStep
from ktrainer.steps.variable_broadcast import broadcast_variables

if TYPE_CHECKING:
    from ktrainer.config import DataConfig


_OTHER_SHAPES = (
    "trainer.reduce adds up results of one shape, and ranks have results of different shapes. Sum "
    "over the rows in the step (tf.reduce_sum), or gather them. Shapes here:"
)


class RankLoop(UserLoop):
    """Runs steps on this rank's rows; gradients, metrics and results are summed over ranks.

    Args:
        world: the ranks.
        collectives: sums over ranks, inside of steps.
        data: the configuration of the data.
    """

    def __init__(self, world: World, collectives: GradientCollectives, data: DataConfig) -> None:
        super().__init__(world)
        self._collectives, self._data = collectives, data
        self._traced: set[Any] = set()
        self._equal: set[Any] = set()  # references of variables that all ranks have alike
        self._heals = self._in_body = False
        self._error: Exception | None = None  # of a rank, in the present step
        self._size, self._sum = collectives.size, self._compiled_sum()

    def distribute(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self._data.shard != "batch":
            raise ConfigError(
                "trainer.distribute gives each rank its rows of every batch. Set data.shard=batch; "
                "or shard the dataset in the script, and set data.batch=per_worker",
                path="data.shard",
                value=self._data.shard,
            )
        if self._data.batch == "global":
            return DistributedDataset(dataset, self.world, self._data.prefetch)
        require_dataset(dataset)
        compare_datasets(dataset, self.world)
        return dataset

    def heal_steps(self, variables: Sequence[Any] | None) -> None:
        """Let a step whose ranks are lost be repeated, instead of raising: its results are NaN (0
        for whole numbers), and `take_error` says so.

        Args:
            variables: those that steps may use, which all ranks have alike already; None ends it.
        """
        self._heals, self._in_body, self._error = variables is not None, False, None
        self._equal.update(_reference(v) for v in variables or ())

    def rows(self, local: LocalBatch) -> Any:
        self._in_body = self._heals  # in callbacks errors are raised: the run itself heals
        return super().rows(local)

    def take_error(self) -> BaseException | None:
        error, self._error, self._in_body = self._error, None, False
        return error

    @tf.autograph.experimental.do_not_convert
    def run(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._forget_traces_of_other_ranks()
        compiled: LoopStep = self._compiled(step)
        if not tf.executing_eagerly():
            return self._run_traced(compiled, args)
        result = self._unless_lost(lambda: self._run_traced(compiled, args))
        if self._error is None:
            return result
        concrete = compiled.function.get_concrete_function(*_specs_of(args))
        return tf.nest.map_structure(_unknown, concrete.structured_outputs)

    def _forget_traces_of_other_ranks(self) -> None:
        """Trace steps again once ranks were lost or have joined: their number is in the traces."""
        if self._size != self._collectives.size:
            self._size = self._collectives.size
            self._steps.clear()
            self._traced.clear()
            self._sum = self._compiled_sum()

    def _compiled_sum(self) -> Any:
        return tf.function(self._sum_over_ranks, autograph=False, reduce_retracing=True)

    def _unless_lost(self, call: Callable[[], Any]) -> Any:
        """The result of `call`; in a body that is repeated because a rank is lost, None."""
        if self._error is None:
            try:
                return call()
            except Exception as error:
                if not (self._in_body and self.world.has_lost(error)):
                    raise
                self._error = error
        return None

    def _sum_now(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with self._explained():
            sums: list[tf.Tensor] = self._sum(tensors)
        return sums

    def _run_traced(self, compiled: LoopStep, args: tuple[Any, ...]) -> Any:
        self._trace(compiled, args)
        with self._explained():
            return compiled.function(*args)

    @tf.autograph.experimental.do_not_convert
    def reduce(self, op: ReduceOp, value: Any) -> Any:
        self._forget_traces_of_other_ranks()
        leaves = tf.nest.flatten(value)
        present = [i for i, leaf in enumerate(leaves) if leaf is not None]
        if not present:
            return value
        given = [tf.convert_to_tensor(leaves[i]) for i in present]
        # A total may be too large for the type of the mean.
        tensors = [tf.cast(each, wide_type(each)) if op == "mean" else each for each in given]
        sums = self._unless_lost(lambda: self._sum_now(tensors))
        if self._error is not None:
            sums = [_unknown(tensor) for tensor in tensors]
        for i, each, total in zip(present, given, sums, strict=True):
            mean = each.dtype if each.dtype.is_floating else tf.float64
            leaves[i] = total if op == "sum" else tf.cast(total / self._collectives.size, mean)
        return tf.nest.pack_sequence_as(value, leaves)

    def _compile(self, step: Callable[..., Any]) -> LoopStep:
        return LoopStep(step, self._collectives, self.world.stable_rank, self._count)

    def _count(self) -> None:
        self.world.step += 1

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context in which the error of a collective is its own, not TensorFlow's."""
        try:
            with super()._explained():
                yield
        except tf.errors.OpError as error:
            cause = self._collectives.failure(error)
            if cause is None:
                raise
            raise cause from error

    def _trace(self, step: LoopStep, args: tuple[Any, ...]) -> None:
        """Trace a step for any number of rows, so that all ranks have the same program."""
        specs = _specs_of(args)
        key = (id(step), repr(tf.nest.map_structure(_text_of, specs)))
        if tf.executing_eagerly() and key in self._traced:
            return
        concrete = step.function.get_concrete_function(*specs)
        self._traced.add(key)
        if step.needs_equal:
            self._make_equal(concrete, step.applies)

    def _make_equal(self, concrete: Any, applies: bool) -> None:
        """Give variables that a step has used for the first time the values of rank 0."""
        handles = {id(variable.handle): variable for variable in concrete.variables}
        used = [handles[id(t)] for t in concrete.captured_inputs if id(t) in handles]
        new = [v for v in used if v.ref() not in self._equal]
        if not new:
            return  # a rank may trace alone, such as a batch that is padded to another length
        if self._heals and not applies:
            return  # a rank that has joined traces alone
        if self._heals:
            raise ModelError(
                "the step uses variables that trainer.steps was not given, and ranks that join "
                f"would not have: {', '.join(v.name for v in new)}. Give it what they belong to, "
                "as model=, optimizer= or state={...}"
            )
        self._equal.update(v.ref() for v in new)
        with tf.init_scope():
            broadcast_variables([(v.name, v) for v in new], self.world)

    def _sum_over_ranks(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over ranks of tensors of any shapes, one collective for whole numbers and floats."""
        sums, order = list(tensors), InOrder()
        scalars = all(tensor.shape.rank == 0 for tensor in tensors)
        checks = [] if scalars else self._same_shapes(tensors, order)
        for wide in (tf.float64, tf.int64):
            places = [i for i, t in enumerate(tensors) if wide_type(t) == wide]
            if not places:
                continue
            with tf.control_dependencies(checks):
                parts = [tf.cast(tensors[i], wide) for i in places]
            total = self._sum_in_order(concatenated(parts), order)
            for i, value in zip(places, split_like(total, parts), strict=True):
                sums[i] = tf.cast(value, tensors[i].dtype)
        return sums

    def _same_shapes(self, tensors: Sequence[tf.Tensor], order: InOrder) -> list[tf.Operation]:
        """Assert that all ranks have tensors of the same shapes, by the sums of hashes."""
        shapes = [tf.concat([[tf.rank(t)], tf.shape(t)], 0) for t in tensors]
        text = tf.strings.reduce_join(tf.strings.as_string(tf.concat(shapes, 0)), separator=" ")
        hashes = tf.stack([tf.strings.to_hash_bucket_fast(text + end, 2**20) for end in ("", "#")])
        sums, squares = tf.split(self._sum_in_order(tf.concat([hashes, hashes**2], 0), order), 2)
        # Numbers are equal if, and only if, the square of their sum is as large as it can be.
        equal = tf.reduce_all(self._collectives.size * squares == sums**2)
        return assert_in_graph(equal, _OTHER_SHAPES, [tf.shape(t) for t in tensors])

    def _sum_in_order(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        # Taking turns also where the engine needs none: sums of two calls must not overlap.
        return order(lambda: [self._collectives.sum(vector, order)])[0]


def _text_of(spec: Any) -> str:
    plain = isinstance(spec, (tf.TypeSpec, bool, int, float, str, bytes, type(None)))
    return repr(spec) if plain else f"{type(spec).__name__} {id(spec)}"


def _specs_of(args: Any) -> Any:
    return tf.nest.map_structure(_spec_of, args)


def _unknown(value: Any) -> Any:
    """A tensor like `value`, or of its spec, of a step that did not count."""
    if not isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return value
    shape = [0 if length is None else length for length in value.shape]
    return tf.fill(shape, tf.constant(float("nan") if value.dtype.is_floating else 0, value.dtype))


def _reference(variable: Any) -> Any:
    inner = getattr(variable, "variable", variable)  # of a StateVariable
    return (
        getattr(inner, "value", inner).ref() if isinstance(inner, keras.Variable) else inner.ref()
    )


def _spec_of(value: Any) -> Any:
    """The spec of an argument with any number of rows; what is no tensor as it is."""
    if isinstance(value, (tf.Variable, keras.Variable)):
        return value
    if isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        spec = tf.type_spec_from_value(value)
    elif hasattr(value, "__array__") and hasattr(value, "dtype"):
        spec = tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))
    else:
        return value
    return spec if spec.shape.rank == 0 else any_rows(spec)
