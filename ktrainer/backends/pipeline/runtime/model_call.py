"""The call of a cut model inside of a step: its outputs, with their gradient through the stages.

Every process of a replica runs the same step on the same batch, and makes the same calls. The model
returns its outputs in each of them; a `tf.GradientTape` that asks for gradients runs the stages
backward, and gets those of the variables that this process holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.partition.stage_graphs import is_differentiable
from ktrainer.backends.pipeline.runtime.stage_runner import StageRunner
from ktrainer.backends.pipeline.stage.loss_head import outputs_of
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps.assertions import assert_in_graph
from ktrainer.steps.compiled_program import trace
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.step_helpers import STEPS

# of(outputs), of losses added -> gradients of the variables held here, and of the inputs
Backward = Callable[[list[Any], Any], tuple[list[Any], list[Any]]]


def is_watched(inputs: Sequence[Any]) -> bool:
    """Return whether a tape of this thread watches one of these tensors."""
    smooth = [x for x in inputs if is_differentiable(x)]
    return bool(smooth) and bool(record.should_record_backprop(smooth))


def linked_outputs(
    runner: StageRunner,
    graph: Graph,
    made: Sequence[Any],
    inputs: Sequence[Any],
    backward: Backward,
) -> tuple[Any, list[Any]]:
    """A model's outputs, whose gradients tapes get from `backward`.

    Args:
        graph: of the model.
        made: its outputs and their masks, then the losses that layers have added, if any have.
        inputs: flat, if they are watched.
        backward: runs the stages backward.

    Returns:
        The outputs, structured as the model returns them, and its `losses`.
    """
    ids = graph.needed_at_the_end
    smooth = [x for x in made if is_differentiable(x)]
    with record.stop_recording():  # other tensors than those that a tape knows how to make
        fresh = [tf.identity(x) for x in smooth]
    given = [x for x in inputs if is_differentiable(x)]
    weights = [tf.convert_to_tensor(v.value) for v in runner.held]
    sources = [runner.anchor(), *given, *weights]
    adds = len(made) > len(ids)

    def gradient(*of: Any) -> list[Any]:
        of_outputs, of_added = (list(of[:-1]), of[-1]) if adds else (list(of), None)
        of_variables, of_inputs = backward(of_outputs, of_added)
        of_variables = _sum_shared(runner, of_variables)
        of_inputs = runner.messages.sum(of_inputs, given, "gradients of inputs")
        once = [_first_order(g, sources) for g in (*of_inputs, *of_variables)]
        for variable, found in zip(runner.held, once[len(given) :], strict=True):
            _tag(found, id(variable))
        return [None, *once]

    record.record_operation("Stages", fresh, sources, gradient)
    rest = iter(fresh)
    flat = [next(rest) if is_differentiable(x) else x for x in made]
    outputs = outputs_of(graph, dict(zip(ids, flat, strict=False)))
    return outputs, flat[len(ids) :]


def _sum_shared(runner: StageRunner, gradients: Sequence[Any]) -> list[Any]:
    """Gradients of the variables held here, those that several stages hold summed over these."""
    mine = {id(v): g for v, g in zip(runner.held, gradients, strict=True)}
    shared = [mine.get(id(v)) for v in runner.shared]
    summed = runner.messages.sum(shared, runner.shared, "gradients of shared weights")
    mine.update(zip(map(id, runner.shared), summed, strict=True))
    return [mine[id(v)] for v in runner.held]


# Variables that gradients are of, by the tensors' names, in each graph.
_tags: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def _tag(gradient: Any, variable: int) -> None:
    """Note which variable a gradient is of, by `id()`; 0: it stands for all stages."""
    tensor = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if tensor is not None and tf.is_symbolic_tensor(tensor):
        _tags.setdefault(tensor.graph, {})[tensor.name] = variable


def whole(value: tf.Tensor) -> tf.Tensor:
    """`value`, which is the same on all stages: what depends on it depends on all gradients."""
    made = tf.identity(value)
    _tag(made, 0)
    return made


def tagged_variable(tensor: tf.Tensor) -> int | None:
    """`id()` of the variable that a tensor is the gradient of, as the stages gave it; 0 for what
    was summed over stages; None for other tensors."""
    return _tags.get(tensor.graph, {}).get(tensor.name)


def _first_order(gradient: Any, sources: Sequence[Any]) -> Any:
    """`gradient`, which refuses to be differentiated itself."""

    def refuse(_: Any) -> Any:
        raise ModelError(
            "a gradient of a model that is cut into stages was differentiated once more (a "
            "gradient penalty, a Hessian), which the stages do not compute: train with "
            "backend=data_parallel, or use a penalty of first order"
        )

    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _first_order(gradient.values, sources)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    with record.stop_recording():
        made = tf.identity(gradient)
    record.record_operation("GradientOfStages", [made], list(sources), refuse)
    return made


def call_in_microbatches(
    runner: StageRunner, inputs: Any, training: bool, count: int, context: StepContext | None
) -> tuple[Any, list[Any]]:
    """Call a cut model on a whole batch, which goes through the stages in microbatches.

    All forward passes come first: what the step computes, it computes of the whole batch.

    Args:
        inputs: nested tensors.
        count: of microbatches, at most the number of rows. They differ in size by one row at most,
            the larger ones first.
        context: of the step that is traced.

    Returns:
        The outputs, and the model's `losses`.
    """
    inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
    flat = keras.tree.flatten(inputs)
    graph = runner.graph(inputs, training)
    if not all(graph.tensors[i].shape[:1] == (None,) for i in (*graph.inputs, *graph.outputs)):
        count = 1  # a part of the batch says nothing of such an output
    watched = is_watched(flat)
    sizes = _sizes(flat, count) if count > 1 else None
    parts = list(zip(*(_split(x, sizes, count) for x in flat), strict=True))
    passes = []
    for k, part in enumerate(parts):
        nested = keras.tree.pack_sequence_as(inputs, list(part))
        share = 1.0 if sizes is None else sizes[k] / tf.reduce_sum(sizes)
        passes.append(runner.forward(k, nested, training, watched, _counter(share, context)))
    every = [runner.outputs(k, done) for k, done in enumerate(passes)]
    runner.messages.flush()
    made = [_joined(values) for values in zip(*every, strict=True)]

    def backward(of_outputs: list[Any], of_added: Any) -> tuple[list[Any], list[Any]]:
        cut = list(zip(*(_split(x, sizes, count) for x in of_outputs), strict=True))
        found = [
            runner.backward(k, done, cut[k] if cut else [], of_added)
            for k, done in enumerate(passes)
        ]
        runner.messages.flush()
        of_variables = [_total(each) for each in zip(*(v for v, _ in found), strict=True)]
        return of_variables, [_rows_of(each) for each in zip(*(x for _, x in found), strict=True)]

    given = flat if watched else []
    return linked_outputs(runner, graph, made, given, backward)


def _sizes(inputs: Sequence[Any], count: int) -> tf.Tensor:
    """The rows of each microbatch, int64."""
    rows = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in inputs])
    check = assert_in_graph(
        tf.reduce_all(rows == rows[0]) & (rows[0] >= count),
        f"a step calls its model on a batch that cannot be cut into {count} microbatches: its "
        "inputs have different numbers of rows, or fewer. Set backend.microbatches=1. Rows:",
        rows,
    )
    with tf.control_dependencies(check):
        whole, more = rows[0] // count, rows[0] % count
    return whole + tf.cast(tf.range(count, dtype=tf.int64) < more, tf.int64)


def _split(tensor: Any, sizes: Any, count: int) -> list[Any]:
    return [tensor] if sizes is None else list(tf.split(tensor, sizes, num=count))


def _counter(share: Any, context: StepContext | None) -> Callable[[Any], Any]:
    """Makes of a loss of one microbatch its part of that of the batch: of a number the mean over
    examples, of a vector over examples the sum, as Keras does."""

    def count(loss: Any) -> tf.Tensor:
        total = keras.ops.sum(loss)
        if context is not None and context.is_over_examples(loss):
            return context.as_mean(total)
        return total * tf.cast(share, total.dtype)

    return count


def _joined(values: Sequence[Any]) -> Any:
    """The value of the whole batch; of a number, which is a loss, the sum of its parts."""
    if len(values) == 1:
        return values[0]
    return tf.concat(values, 0) if values[0].shape.rank else tf.add_n(list(values))


def _total(gradients: Sequence[Any]) -> Any:
    """The sum over microbatches; slices stay in the order of rows."""
    present = [g for g in gradients if g is not None]
    if not present:
        return None
    if all(isinstance(g, tf.IndexedSlices) for g in present):
        values = tf.concat([g.values for g in present], 0)
        indices = tf.concat([g.indices for g in present], 0)
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    total = tf.convert_to_tensor(present[0])
    for gradient in present[1:]:
        total = total + tf.convert_to_tensor(gradient)
    return total


def _rows_of(gradients: Sequence[Any]) -> Any:
    """The gradient of an input, of those of its microbatches."""
    if any(g is None for g in gradients):
        return None
    return _joined([tf.convert_to_tensor(g) for g in gradients])


class _Called(Exception):
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


def inputs_of_call(model: keras.Model, kind: str, spec: Any) -> Any:
    """Nested specs of what a step calls its model with.

    Raises:
        ModelError: it does not call it.
    """

    def stop(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer is model and args:
                raise _Called(args[0])
            return original(layer, *args, **kwargs)

        return call

    cls = type(model)
    try:
        with replaced((cls, "__call__", stop(cls.__call__))):
            trace(getattr(model, STEPS[kind]), spec)
    except _Called as called:
        return keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), called.inputs)
    raise ModelError(
        f"{cls.__name__}.{STEPS[kind]} does not call the model, self(x), which a pipeline cuts "
        "into stages: give the model a `call` whose outputs have all that the loss needs, and call "
        "it, or train with backend=data_parallel."
    )


def single_input(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The input of a call of a model that is cut, and its `training` argument.

    Raises:
        ModelError: it has other arguments.
    """
    others = sorted(set(kwargs) - {"training"})
    if len(args) != 1 or others:
        raise ModelError(
            f"model {model.name!r} was called with {len(args)} positional arguments and {others}: "
            "a model that is cut into stages takes one, which may be nested (a tuple or a dict of "
            "tensors), and training=True or False"
        )
    training = kwargs.get("training")
    if training is None:
        parameter = inspect.signature(model.call).parameters.get("training")
        training = parameter is not None and parameter.default is True
    return args[0], bool(training)
