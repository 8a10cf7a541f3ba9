"""Checks of steps that run in every process of a replica, each of which has one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.model_call import tagged_variable
from ktrainer.distributed import World
from ktrainer.errors import DivergenceError, ModelError


def refuse_shared_statistics(planned: PlannedModel) -> None:
    """Refuse statistics that change on several stages: each would have a part of the change.

    Raises:
        ModelError: naming one.
    """
    for variable in planned.model.non_trainable_variables:
        readers = [
            s.index for s in planned.stages(True) if any(v is variable for v in s.non_trainable)
        ]
        if len(readers) > 1 and tf.as_dtype(variable.dtype).is_floating:
            raise ModelError(
                f"{variable.path!r} is used on stages {readers}: its statistics would be parts "
                "that no process has all of. Put all calls of its layer on one stage: with "
                "`with partition(i):`, or backend.stages"
            )


def refuse_empty_stages(planned: PlannedModel) -> None:
    """Refuse a stage without a trained variable: its loop would ask for no gradient, and those
    before it would wait for one.

    Raises:
        ModelError: naming the stages.
    """
    trained = {h for v in planned.compiled_for[1] for h in planned.holders[id(v)]}
    empty = [k for k in range(planned.config.partitions) if k not in trained]
    if empty and trained:
        raise ModelError(
            f"stages {empty} of model {planned.model.name!r} have no trained variables: use fewer "
            "partitions, or put layers with weights on them, with `with partition(i):` (under "
            "ktrainer.modelparallel with auto_partition=False) or backend.stages"
        )


def refuse_layer_metrics(planned: PlannedModel) -> None:
    """Refuse metrics of layers that are not on the last stage, which alone logs metrics.

    Raises:
        ModelError: naming one.
    """
    logged = {id(metric) for metric in planned.model.metrics}
    for stage in (*planned.stages(True), *planned.stages(False)):
        layers = [] if stage.is_last else [n.operation for n in stage.nodes if n.is_layer]
        for layer in (inner for each in layers for inner in each._flatten_layers()):
            for metric in layer._metrics:
                if id(metric) in logged:
                    raise ModelError(
                        f"layer {layer.name!r} updates the metric {metric.name!r} on stage "
                        f"{stage.index} of a pipeline, which logs those of its last stage alone. "
                        "Put the layer on the last stage, with `with partition(i):` or "
                        "backend.stages, or use backend=data_parallel"
                    )


def refuse_combined(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuse gradients that depend on those of other variables: a stage has only its own.

    Raises:
        ModelError: naming two variables.
    """
    names = {id(v): v.path for v in variables}
    for gradient, variable in zip(gradients, variables, strict=True):
        waiting = _tensors_of(gradient)
        seen: set[str] = set()
        while waiting:
            tensor = waiting.pop()
            of = tagged_variable(tensor)
            if of is None:
                new = [x for x in tensor.op.inputs if x.name not in seen]
                seen.update(x.name for x in new)
                waiting += new
            elif of not in (id(variable), 0):
                raise ModelError(
                    f"the gradient that is applied to {variable.path!r} depends on that of "
                    f"{names.get(of, 'another variable')!r}. Each stage has the gradients of its "
                    "own variables alone: clip them with tf.clip_by_global_norm, the optimizer's "
                    "global_clipnorm or trainer.clip, which count those of all stages, or treat "
                    "each by itself"
                )


def _tensors_of(gradient: Any) -> list[Any]:
    if gradient is None:
        return []
    return [gradient.values] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def common_logs(logs: Any, stages: World, step: str) -> Any:
    """A step's logs, which must be the same on all stages.

    Args:
        logs: nested tensors.
        stages: the processes of this replica, which call this together.
        step: its name.

    Raises:
        DivergenceError: they are not, on all of them.
    """
    flat = [np.asarray(x) for x in keras.tree.flatten(logs)]
    every = stages.allgather(flat, "logs of the step")
    for stage, others in enumerate(every[:-1]):
        if not _close(others, every[-1]):
            raise DivergenceError(
                f"{step} returned {_text(logs, others)} on stage {stage} and "
                f"{_text(logs, every[-1])} on the last one: what it computes must depend on the "
                "batch and on the model's outputs alone, since each stage has its own weights and "
                "gradients. A penalty of weights belongs into kernel_regularizer, or weight_decay "
                "of the optimizer"
            )
    return keras.tree.pack_sequence_as(logs, every[-1])


def _close(one: Sequence[np.ndarray], two: Sequence[np.ndarray]) -> bool:
    def same(a: np.ndarray, b: np.ndarray) -> bool:
        if a.shape != b.shape or a.dtype.kind != "f":
            return a.shape == b.shape and bool(np.array_equal(a, b))
        return bool(np.allclose(a, b, 1e3 * np.finfo(a.dtype).eps, 1e-30, equal_nan=True))

    return len(one) == len(two) and all(map(same, one, two))


def _text(logs: Any, values: Sequence[np.ndarray]) -> str:
    return str(keras.tree.map_structure(str, keras.tree.pack_sequence_as(logs, list(values))))
