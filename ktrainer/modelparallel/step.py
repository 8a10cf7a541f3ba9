"""`step`: a function that runs once for each microbatch, through the stages of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.errors import ModelError
from ktrainer.modelparallel import coroutines, state
from ktrainer.modelparallel.coroutines import Coroutine
from ktrainer.modelparallel.distributed_model import cut, pipeline_config
from ktrainer.modelparallel.model_call import RUNNER, Backward, Forward
from ktrainer.modelparallel.split_arguments import split_arguments
from ktrainer.modelparallel.stage_runner import StageRunner
from ktrainer.modelparallel.step_output import StepOutput


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function that computes one step, to run once for each microbatch.

    Every tensor among its arguments is split along axis 0; nested ones too, and objects with a
    `smp_slice(num_mb, mb, axis)`. Each returned tensor becomes a `StepOutput`. It calls one
    `DistributedModel`, once. All ranks of a replica call it together, with the same batch.

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
        # Autograph rewrites what a tf.function calls, but not what a thread does.
        status = tf.__internal__.autograph.control_status_ctx()
        body = tf.__internal__.autograph.tf_convert(function, status)
        calls = [functools.partial(body, *a, **k) for a, k in parts]
        bodies = [Coroutine(functools.partial(_taped, c), "smp.step") for c in calls]
        given = [x for x in tf.nest.flatten([args, kwargs]) if isinstance(x, tf.Tensor)]
        results = _Step(bodies, given).run()
        axis = None if any((input_split_axes or {}).values()) else 0
        return tf.nest.map_structure(lambda *values: StepOutput(values, axis), *results)

    return tf.autograph.experimental.do_not_convert(run)


def gradients(loss: Any, variables: Any) -> Any:
    """Gradients of `loss` with respect to `variables`, inside of a step, after the model's call.

    The same as those of a `tf.GradientTape` around the body.

    Raises:
        ModelError: it is called outside of a step, or a second time.
    """
    body = coroutines.current()
    tape = getattr(body, "tape", None)
    if tape is None:
        raise ModelError(
            "smp.gradients is called once, inside of a function decorated with @smp.step, after "
            "the DistributedModel"
        )
    body.tape = None  # type: ignore[union-attr]
    return tape.gradient(
        loss, tf.nest.map_structure(lambda v: v.value if _is_keras(v) else v, variables)
    )


def _is_keras(variable: Any) -> bool:
    return isinstance(variable, keras.Variable)


def _taped(call: Callable[[], Any]) -> Any:
    """Run a body with the tape that `gradients` asks."""
    with tf.GradientTape() as tape:
        coroutines.current().tape = tape  # type: ignore[union-attr]
        return call()


class _Step:
    """One call of a decorated function.

    Args:
        bodies: one for each microbatch.
        given: the tensors among the arguments, which all stages must have alike.
    """

    def __init__(self, bodies: Sequence[Coroutine], given: Sequence[tf.Tensor]) -> None:
        self.bodies, self._given = bodies, given
        self._passes: dict[int, Any] = {}
        self._runner: StageRunner | None = None

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
        row = schedule.actions[state.current().mp.rank]
        try:
            for action in row:
                if action.kind == "F":
                    self._forward(action.microbatch)
                else:
                    self._backward(action.microbatch)
            if not schedule.trains:
                for microbatch in range(len(self.bodies)):
                    self._backward(microbatch, trains=False)
            assert self._runner is not None
            self._runner.finish()
        finally:
            for body in self.bodies:
                body.abandon()
        return [body.result for body in self.bodies]

    def _forward(self, microbatch: int) -> None:
        body = self.bodies[microbatch]
        body.resume()
        asked = body.request
        if not isinstance(asked, Forward):
            raise ModelError(
                "a function decorated with @smp.step returned without a call of a "
                "DistributedModel: what it returns must depend on the model's output"
            )
        runner = self._runner_of(asked)
        if self._runner is None:
            runner.begin()
            runner.compare(self._given)
        self._runner = runner
        self._passes[microbatch] = runner.forward(microbatch, asked.inputs, asked.training)

    def _runner_of(self, asked: Forward) -> StageRunner:
        found = vars(asked.model).get(RUNNER)
        if found is None:
            specs = keras.tree.map_structure(
                lambda x: tf.TensorSpec(x.shape, x.dtype), asked.inputs
            )
            found = StageRunner(cut(asked.model, specs))
            vars(asked.model)[RUNNER] = found
        return found

    def _backward(self, microbatch: int, trains: bool = True) -> None:
        assert self._runner is not None
        body, done = self.bodies[microbatch], self._passes.pop(microbatch)
        body.resume(self._runner.outputs(microbatch, done))
        if isinstance(body.request, Backward) and trains:
            body.resume(self._runner.backward(microbatch, done, body.request.of_outputs))
        if body.ended:
            return
        _refuse(body.request, trains)


def _refuse(asked: Any, trains: bool) -> None:
    if isinstance(asked, Forward):
        raise ModelError(
            "a DistributedModel was called twice in one function decorated with @smp.step, but its "
            "schedule has one forward pass of each microbatch: call it once, on a nested input, or "
            "write two functions"
        )
    if not trains:
        raise ModelError(
            "a step asks for gradients, but pipeline='_only_forward' runs no backward passes; use "
            "'interleaved' or 'simple'"
        )
    raise ModelError(
        "a step asks for gradients of the model's output twice, but its schedule has one backward "
        "pass of each microbatch: compute all gradients from one loss in one call"
    )
