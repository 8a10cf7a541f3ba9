"""States of metrics: which of them add up over parts of the data, and results with other states."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakSet

import keras
import numpy as np

from ktrainer.errors import ModelError
from ktrainer.steps.named_variables import views_of

States = list[list[np.ndarray]]  # per top-level metric, per variable

# Names of states, in Keras' own metrics, that are sums over examples.
_ADDITIVE = {
    *("total", "count", "sum", "squared_sum", "residual", "num_samples"),
    *("true_positives", "false_positives", "true_negatives", "false_negatives"),
    *("accumulator", "intermediate_weights", "total_confusion_matrix"),
}

_warned: WeakSet[type] = WeakSet()


def adds_up(metric: Any) -> bool:
    """Return whether the metric of all data has the sum of the states of parts of the data.

    True for Keras' own families (means, sums, confusion counts, AUC, precision and recall, F1,
    IoU, R2), their subclasses without states of their own, and metrics made of such metrics
    alone. Any other metric says so with an attribute `state_adds_up = True` (or False).
    """
    declared = getattr(metric, "state_adds_up", None)
    if declared is not None:
        return bool(declared)
    own = metric._variables
    known = _of_known_family(metric) and all(v.name in _ADDITIVE for v in own)
    of_parts = bool(metric._metrics) and not own
    return all(adds_up(part) for part in metric._metrics) and (known or of_parts)


def _of_known_family(metric: Any) -> bool:
    base = keras.metrics.Metric
    return any(
        issubclass(cls, base) and cls is not base and cls.__module__.startswith("keras.")
        for cls in type(metric).__mro__
    )


def warn_of_assigned_states(metrics: Iterable[Any]) -> None:
    """Warn, before states are summed, of metrics that assign theirs by themselves: they count as
    Keras' own, but a largest value in a `Mean` is no sum. Once for each class."""
    for metric in metrics:
        if getattr(metric, "state_adds_up", None) is not None or not adds_up(metric):
            continue
        warn_of_assigned_states(metric._metrics)
        kind = type(metric)
        if kind not in _warned and "assign" in _names_of_own_updates(kind):
            _warned.add(kind)
            warnings.warn(
                f"the metric {metric.name} assigns its states by itself; they are summed over "
                "ranks or replicas, as those of Keras' own are. Set `state_adds_up = True` on its "
                "class if that is right, else False.",
                stacklevel=3,
            )


def _names_of_own_updates(kind: type) -> set[str]:
    """The names in the code of each `update_state` in a class and those before Keras' own."""
    names: set[str] = set()
    for cls in kind.__mro__:
        if cls.__module__.startswith("keras."):
            break
        update: Any = vars(cls).get("update_state")
        function = inspect.unwrap(getattr(update, "python_function", update))
        names |= _names_in(getattr(function, "__code__", None))
    return names


def _names_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def is_compiled_metrics(metric: Any) -> bool:
    """Return whether Keras holds the compiled metrics in `metric`, listed in `metric.metrics`."""
    return isinstance(getattr(type(metric), "metrics", None), property)


def leaf_metrics(model: keras.Model) -> list[Any]:
    """The model's metrics, with those that are compiled one by one."""
    return [leaf.metric for metric in model.metrics for leaf in metric_leaves(metric, 0)]


def warn_of_unlisted(model: keras.Model, assigned: Collection[int]) -> None:
    """Warn of metrics in which a step counts, and which `model.metrics` does not list: Keras leaves
    out those of models inside, and a class may override the property.

    Args:
        assigned: `id()` of the variables that the step has assigned.
    """
    listed = {id(variable) for variable in model.metrics_variables}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        for metric in layer._metrics:
            if any(id(v) in assigned and id(v) not in listed for v in metric.variables):
                kind = type(model).__name__
                warnings.warn(
                    f"a step counts in the metric {metric.name!r} of {layer.name}, which the "
                    f"property `metrics` of {kind} does not list: logs have the average of what "
                    "each rank or replica has counted of its own rows. Override the property in "
                    f"{kind}, to return that metric too (Keras then resets it in each epoch)",
                    stacklevel=2,
                )


def unadded_metrics(model: keras.Model) -> list[Any]:
    """The metrics of which the state of all data is not the sum of the parts' states."""
    return [metric for metric in leaf_metrics(model) if not adds_up(metric)]


def require_sums(model: keras.Model, why: str, instead: str) -> None:
    """Refuse metrics whose states do not add up.

    Args:
        model: whose metrics are looked at.
        why: what cannot be done with them.
        instead: what to set.

    Raises:
        ModelError: naming them.
    """
    names = [metric.name for metric in unadded_metrics(model)]
    if names:
        raise ModelError(
            f"the states of {', '.join(names)} do not add up, as far as is known, so {why}. Set "
            f"`state_adds_up = True` on the metric's class if they do, or {instead}."
        )


def take_states(metrics: Iterable[Any]) -> States:
    """Copies of the states of `metrics`, on the host."""
    variables = [metric.variables for metric in metrics]
    read = iter(views_of([v for group in variables for v in group]))
    return [[np.array(next(read)) for _ in group] for group in variables]


@dataclass
class MetricLeaf:
    """A metric with a state: a whole top-level metric, or one of the compiled metrics."""

    metric: Any
    top: int  # position of its top-level metric
    entry: int | None  # its index in that metric's results; None: it is the whole result
    start: int  # position of its first variable
    additive: bool
    averaged: Any = None  # mean of its results over ranks, when states do not add up

    @property
    def span(self) -> range:
        return range(self.start, self.start + len(self.metric.variables))


def metric_leaves(metric: Any, top: int) -> list[MetricLeaf]:
    """The metrics of the top-level one at position `top` that have states, in order."""
    if not is_compiled_metrics(metric):
        return [MetricLeaf(metric, top, None, 0, adds_up(metric))]
    leaves, start = [], 0  # CompileMetrics: one entry in its results for each, in this order
    for entry, part in enumerate(metric.metrics):
        leaves.append(MetricLeaf(part, top, entry, start, adds_up(part)))
        start += len(part.variables)
    return leaves


def result_with(metric: Any, states: Sequence[np.ndarray]) -> Any:
    """The result of `metric` with `states`, in NumPy; its own states are unchanged.

    Not `stateless_result`, which does not read a variable that a metric returns as its result.
    """
    means, changed, rest = [], [], iter(states)
    for part in metric.metrics if is_compiled_metrics(metric) else [metric]:
        variables = part.variables
        given = [next(rest) for _ in variables]
        if _is_plain_mean(part, variables, given):
            means.append((part, partial(_mean, *given)))
            continue
        own = zip(variables, map(np.array, views_of(variables)), given, strict=True)
        changed += [each for each in own if each[1].tobytes() != each[2].tobytes()]
    try:
        for variable, _, state in changed:
            variable.assign(state)
        with _own_results(means):
            return keras.tree.map_structure(_to_numpy, metric.result())
    finally:
        for variable, mine, _ in changed:
            variable.assign(mine)


@contextmanager
def _own_results(results: Sequence[tuple[Any, Callable[[], Any]]]) -> Iterator[None]:
    """Have metrics return these results inside the block, past Keras' slow `__setattr__`."""
    try:
        for metric, result in results:
            vars(metric)["result"] = result
        yield
    finally:
        for metric, _ in results:
            vars(metric).pop("result", None)


def _is_plain_mean(metric: Any, variables: list[Any], states: list[np.ndarray]) -> bool:
    """Whether Keras computes the result of these states as `_mean` does."""
    if "result" in vars(metric) or type(metric).result is not keras.metrics.Mean.result:
        return False
    if [id(v) for v in variables] != [id(metric.total), id(metric.count)]:
        return False
    dtype = metric.dtype
    return dtype in ("float32", "float64") and all(s.dtype == dtype and not s.ndim for s in states)


def _mean(total: np.ndarray, count: np.ndarray) -> Any:
    """Keras' result, to the bit, without TensorFlow, which takes 0.2 ms for each metric.

    It computes the rare ones: it makes 0 of a subnormal number, and of a division by 0.
    """
    if count >= 1 and np.isfinite(total):
        mean = np.divide(total, count)
        if total == 0 or abs(mean) >= np.finfo(mean.dtype).tiny:
            return mean
    return keras.ops.divide_no_nan(total, count)


def _to_numpy(value: Any) -> np.ndarray:
    return np.array(value.numpy() if hasattr(value, "numpy") else value)
