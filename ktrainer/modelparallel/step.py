"""`step`: a function that runs once for each microbatch, through the stages of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.stage_runner import StageRunner
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.errors import ModelError
from ktrainer.modelparallel import coroutines, state
from ktrainer.modelparallel.coroutines import Coroutine
from ktrainer.modelparallel.distributed_model import cut, pipeline_config
from ktrainer.modelparallel.model_call import RUNNER, Backward, Forward
from ktrainer.modelparallel.split_arguments import split_arguments
from ktrainer.modelparallel.step_output import StepOutput
from ktrainer.runtime.autograph import rewritten_by_autograph


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function that computes one step, to run once for each microbatch.

    Every tensor among its arguments is split along axis 0; nested ones too, and objects with a
    `smp_slice(num_mb, mb, axis)`. Each returned tensor becomes a `StepOutput`. It calls a
    `DistributedModel`, or several. All ranks of a replica call it together, with the same batch.

    Args:
        function: the body.
        non_split_inputs: names of arguments that every microbatch gets as they are.
        input_split_axes: the axis to split an argument along, by its name, where it is not 0.

    Raises:
        ModelError: an argument is named that the function does not have.
        DataError: an argument cannot be split into equal microbatches.
    """
    if function is None:
        return functools.partial(
            step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes
        )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if coroutines.current() is not None:
            raise ModelError("a function decorated with @smp.step was called inside of another")
        count = state.current().settings.microbatches
        parts = split_arguments(
            function, args, kwargs, count, non_split_inputs or (), input_split_axes or {}
        )
        # AutoGraph does not reach what a thread calls.
        body = rewritten_by_autograph(function)
        calls = [functools.partial(body, *a, **k) for a, k in parts]
        bodies = [Coroutine(functools.partial(_taped, c), "smp.step") for c in calls]
        given = [x for x in tf.nest.flatten([args, kwargs]) if isinstance(x, tf.Tensor)]
        results = _Step(bodies, given).run()
        axis = None if any((input_split_axes or {}).values()) else 0
        return tf.nest.map_structure(lambda *values: StepOutput(values, axis), *results)

    run.__module__ = __name__  # for AutoGraph, which leaves functions of this package as they are
    return run


def gradients(loss: Any, variables: Any) -> Any:
    """Gradients of `loss` with respect to `variables`, inside of a step, after the model's call.

    The same as those of a `tf.GradientTape` around the body; also of several losses, one after the
    other.

    Raises:
        ModelError: it is called outside of a step.
    """
    body = coroutines.current()
    if body is None or body.tape is None:
        raise ModelError(
            "smp.gradients is called inside of a function decorated with @smp.step, after the "
            "DistributedModel"
        )
    with body.tape.stop_recording():
        return body.tape.gradient(
            loss, tf.nest.map_structure(lambda v: v.value if _is_keras(v) else v, variables)
        )


def _is_keras(variable: Any) -> bool:
    return isinstance(variable, keras.Variable)


def _taped(call: Callable[[], Any]) -> Any:
    """Run a body with the tape that `gradients` asks."""
    body = coroutines.current()
    assert body is not None
    with tf.GradientTape(persistent=True) as body.tape:
        return call()


class _Step:
    """One call of a decorated function.

    The schedule runs the first call of a model in each body, and its backward pass if that is asked
    for next. What a body asks for beyond that, of this model or another one, is done afterwards,
    for all microbatches in turn.

    Args:
        bodies: one for each microbatch.
        given: the tensors among the arguments, which all stages must have alike.
    """

    def __init__(self, bodies: Sequence[Coroutine], given: Sequence[tf.Tensor]) -> None:
        self.bodies, self._given = bodies, given
        self._runners: dict[int, StageRunner] = {}  # by `id()` of the model
        self._calls: dict[int, Any] = {}  # the passes that bodies wait for, by microbatch

    def run(self) -> list[Any]:
        """Run all microbatches; the results of the bodies."""
        settings = state.current().settings
        schedule = make_schedule(
            settings.pipeline,
            settings.partitions,
            settings.microbatches,
            1,
            pipeline_config(settings).active_microbatches,
        )
        every = range(len(self.bodies))
        try:
            for action in schedule.actions[state.current().mp.rank]:
                if action.kind == "F":
                    self._begin(action.microbatch)
                else:
                    self._continue(action.microbatch, schedule.trains)
            while not all(body.ended for body in self.bodies) or self._calls:
                waiting = [k for k in every if not self.bodies[k].ended]
                for k in waiting:
                    self._forward(k)
                for k in waiting:
                    self._continue(k, schedule.trains)
            for runner in self._runners.values():
                runner.finish()
        finally:
            for body in self.bodies:
                body.abandon()
        return [body.result for body in self.bodies]

    def _begin(self, microbatch: int) -> None:
        """Run a body up to its first call of a model, and that forward."""
        body = self.bodies[microbatch]
        body.resume()
        if not isinstance(body.request, Forward):
            raise ModelError(
                "a function decorated with @smp.step returned without a call of a "
                "DistributedModel: what it returns must depend on the model's output"
            )
        self._forward(microbatch)

    def _forward(self, microbatch: int) -> None:
        """Run the stage forward if a body asks for that and it has not run yet."""
        asked = self.bodies[microbatch].request
        if microbatch in self._calls or not isinstance(asked, Forward):
            return
        runner = self._runner_of(asked)
        runner.graph(asked.inputs, asked.training)
        self._calls[microbatch] = runner.forward(
            microbatch, asked.inputs, asked.training, asked.watched
        )

    def _continue(self, microbatch: int, trains: bool) -> None:
        """Give a body the outputs that it waits for, or gradients; and gradients of these outputs
        if it asks for them at once."""
        body = self.bodies[microbatch]
        if microbatch in self._calls:
            runner, call = self._runner_of(body.request), self._calls.pop(microbatch)
            body.resume((runner.outputs(microbatch, call), (runner, call)))
        asked = body.request
        if isinstance(asked, Backward):
            if not trains:
                raise ModelError(
                    "a step asks for gradients, but pipeline='_only_forward' runs no backward "
                    "passes; use 'interleaved' or 'simple'"
                )
            runner, call = asked.of_call
            body.resume(runner.backward(microbatch, call, asked.of_outputs, asked.of_added))

    def _runner_of(self, asked: Forward) -> StageRunner:
        found = self._runners.get(id(asked.model)) or vars(asked.model).get(RUNNER)
        if found is None:
            specs = keras.tree.map_structure(
                lambda x: tf.TensorSpec(x.shape, x.dtype), asked.inputs
            )
            found = StageRunner(cut(asked.model, specs))
            vars(asked.model)[RUNNER] = found
        if not self._runners:
            found.begin()
            found.compare(self._given)
        self._runners[id(asked.model)] = found
        return found
