"""Find which logs of a step are metric results, whatever they are called.

What a metric's `result()` returns inside of a step says how the metric stands in this process, or
on this replica; on all data together it is known only when the states of all have been added up.
So it is remembered, while a step is traced, what came from which metric, also through further
computation: `{"f1": 2 * p * r / (p + r)}` is computed again from what `p` and `r` are then. A model
that runs eagerly leaves no trace of such computation, and has only the results themselves known.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from ktrainer.runtime.monkeypatching import Replacements
from ktrainer.state.nested_logs import LogPath, flatten_paths, unflatten_paths
from ktrainer.steps.graph_parts import upstream
from ktrainer.steps.metric_states import is_compiled_metrics, leaf_metrics


@dataclass(frozen=True, eq=False)
class LogSource:
    """A log as a function of metrics' results.

    Attributes:
        metrics: whose results it takes.
        dtypes: of these results.
        graph: what is computed from them; None: nothing, the log is the one metric's result.
        inputs, output: names of the results' tensors and of the log's in `graph`.
    """

    metrics: tuple[Any, ...]
    dtypes: tuple[tf.DType, ...]
    graph: Any = None
    inputs: tuple[str, ...] = ()
    output: str = ""

    def of(self, results: Sequence[Any]) -> Any:
        """The log, from the metrics' results."""
        if self.graph is None:
            return results[0]
        return self._computed(*map(tf.cast, results, self.dtypes))

    @cached_property
    def _computed(self) -> Callable[..., Any]:
        def compute(*results: tf.Tensor) -> tf.Tensor:
            given = dict(zip(self.inputs, results, strict=True))
            return tf.graph_util.import_graph_def(self.graph, given, [self.output])[0]

        return tf.function(compute, autograph=False)


class LoggedResults:
    """The logs of one kind of step that are metrics' results.

    Args:
        model: whose step it is.

    Attributes:
        logs: what the step returns, nested as it is, without values.
        sources: what logs are, by path; None for one that is no metric's, though called like one.
            The others are what they are called like, unless they are in an inner dict or list.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.logs: Any = {}
        self.sources: dict[LogPath, LogSource | None] = {}
        self._returned: dict[int, tuple[Any, Any]] = {}  # a result, which keeps its id, and whose
        self._updated: set[tuple[int, int]] = set()  # (thread of a replica, metric)
        self._partial: set[int] = set()  # results of metrics that the step had updated before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember what metrics return meanwhile; a step is traced inside, in any thread."""
        self._returned.clear()
        self._updated.clear()
        self._partial.clear()
        with Replacements() as replacing:
            for metric in leaf_metrics(self._model):
                replacing.set(metric, "result", self._result(metric))
                replacing.set(metric, "update_state", self._update(metric))
            yield
        self._returned.clear()

    def noting(
        self, step: Callable[[Any], Any], context: Any = None, one_process: bool = False
    ) -> Callable[[Any], Any]:
        """`step`, of which it is noted where its logs come from.

        Args:
            context: the `StepContext` that it is traced in, or one that delegates to those of
                replicas; None: it is one process's.
            one_process: whether all replicas are of this process.
        """

        def noted(batch: Any) -> Any:
            logs = step(batch)
            if context is not None and context.collectives is not None:
                gradients = [gradient for gradient, _ in context.part_gradients.values()]
                self._warn_of_gradients(gradients, one_process)
            if isinstance(logs, Mapping):
                found = flatten_paths(logs)
                self.logs = unflatten_paths(logs, dict.fromkeys(found))
                for path, value in found.items():
                    self._note(path, value)
            return logs

        return noted

    def _warn_of_gradients(self, gradients: Iterable[Any], one_process: bool) -> None:
        """Warn of gradients that depend on metrics' results that lack the rows of other ranks or
        replicas. In one process these are the results of metrics that the step has updated."""
        local = {
            k: metric
            for k, (_, metric) in self._returned.items()
            if not one_process or k in self._partial
        }
        values = [getattr(each, "values", each) for each in gradients] if local else []
        names = {local[id(tensor)].name for tensor in upstream(values) if id(tensor) in local}
        for name in sorted(names):
            warnings.warn(
                f"gradients of {type(self._model).__name__}.train_step depend on the result of the "
                f"metric {name!r}, which has counted the rows of one rank or replica: training is "
                "not that of one process. Keep what the step needs in a variable of "
                "add_weight(trainable=False), whose values are averaged, or with "
                'aggregation="sum", added up.',
                stacklevel=2,
            )

    def of_metrics(self, paths: Collection[LogPath], names: Collection[str]) -> set[LogPath]:
        """Those of `paths` that are metrics' results, whose names are `names`."""
        called = {(name,) for name in names} - self.sources.keys()
        return {p for p in paths if self.sources.get(p) is not None or p in called}

    def now(self, logs: Any) -> dict[LogPath, Any]:
        """Those of the `logs` that are metrics' results, by path, as the metrics stand now."""
        if not isinstance(logs, Mapping):
            return {}
        paths = flatten_paths(logs)
        named: Mapping[str, Any] = {}
        if self._model.metrics and not self.sources.keys() >= paths.keys():
            named = self._model.get_metrics_result()
        values: dict[LogPath, Any] = {(name,): value for name, value in named.items()}
        for path, source in self.sources.items():
            if source is not None and path in paths:
                values[path] = source.of([metric.result() for metric in source.metrics])
        wanted = self.of_metrics(paths, named)
        return {path: values[path] for path in paths if path in wanted}

    def _result(self, metric: Any) -> Callable[[], Any]:
        original = _method(metric, "result")

        def result() -> Any:
            value = original()
            if isinstance(value, keras.Variable):
                value = tf.identity(value.value)
            if tf.is_tensor(value):
                self._returned[id(value)] = value, metric
                if (threading.get_ident(), id(metric)) in self._updated:
                    self._partial.add(id(value))
            return value

        return result

    def _update(self, metric: Any) -> Callable[..., Any]:
        original = _method(metric, "update_state")

        def update_state(*args: Any, **kwargs: Any) -> Any:
            self._updated.add((threading.get_ident(), id(metric)))
            return original(*args, **kwargs)

        return update_state

    def _note(self, path: LogPath, value: Any) -> None:
        updated = {metric for _, metric in self._updated}
        idle = {
            metric.name
            for metric in self._model.metrics
            if not is_compiled_metrics(metric) and id(metric) not in updated
        }
        self.sources.pop(path, None)
        if id(value) in self._returned:
            tensor, metric = self._returned[id(value)]
            self.sources[path] = LogSource((metric,), (tensor.dtype,))
        elif (source := self._computed(path, value)) is not None:
            self.sources[path] = source
        elif path in {(name,) for name in idle}:
            self.sources[path] = None

    def _computed(self, path: LogPath, value: Any) -> LogSource | None:
        """The source of `value`, if it is computed from metrics' results and nothing else."""
        if not tf.is_symbolic_tensor(value):
            return None
        operations: dict[str, Any] = {}
        results: dict[str, tuple[Any, Any]] = {}
        only, waiting = True, [value]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._returned:
                results[tensor.name] = self._returned[id(tensor)]
            elif tensor.op.name not in operations:
                operations[tensor.op.name] = tensor.op
                waiting.extend(tensor.op.inputs)
                only = only and _is_computed(tensor.op)
        if not results:
            return None
        if not only:
            if path not in {(metric.name,) for metric in leaf_metrics(self._model)}:
                _warn(".".join(map(str, path)))
            return None
        metrics = tuple(metric for _, metric in results.values())
        dtypes = tuple(tensor.dtype for tensor, _ in results.values())
        graph = _graph(value.graph, operations.values())
        return LogSource(metrics, dtypes, graph, tuple(results), value.name)


def _method(metric: Any, name: str) -> Callable[..., Any]:
    """A method of a metric, looked up when it is called: its class may be patched meanwhile."""
    if name in vars(metric):
        return vars(metric)[name]
    return lambda *args, **kwargs: getattr(type(metric), name)(metric, *args, **kwargs)


def _is_computed(operation: Any) -> bool:
    """Return whether an operation's outputs follow from its inputs."""
    known = bool(operation.inputs) or operation.type == "Const"
    return known and not operation._is_stateful


def _graph(whole: Any, operations: Collection[Any]) -> Any:
    """A part of a graph by itself, with the functions that it calls."""
    graph = tf.compat.v1.GraphDef()
    for operation in operations:
        node = graph.node.add()
        node.CopyFrom(operation.node_def)
        inputs = [name for name in node.input if not name.startswith("^")]  # order needs no care
        del node.input[:]
        node.input.extend(inputs)
    values = [value for node in graph.node for value in node.attr.values()]
    if any(value.HasField("func") or value.list.func for value in values):
        graph.library.CopyFrom(whole.as_graph_def().library)
    return graph


def _warn(key: str) -> None:
    warnings.warn(
        f"the log {key!r} is computed from results of metrics and from something else: the batch, "
        "a variable, a tensor made outside of the step. Only one process can do that: over "
        "several it is the mean of what each makes of its own part. Log "
        "a metric instead.",
        stacklevel=2,
    )
