"""Results of metrics over all ranks: one fused sum of states.

The mean of the ranks' AUCs is not the AUC, and the mean of means is wrong when ranks saw
different numbers of examples. So states are summed, not results: a metric's states are totals
and counts, and its result is computed once, from their sums over all ranks.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np

from ktrainer.distributed import World
from ktrainer.errors import DivergenceError
from ktrainer.state.nested_logs import (
    LogPath,
    as_keras_flattens,
    as_number,
    flatten_paths,
    path_name,
    unflatten_paths,
)
from ktrainer.steps.metric_logs import LogSource
from ktrainer.steps.metric_states import (
    MetricLeaf,
    States,
    metric_leaves,
    result_with,
    take_states,
    warn_of_assigned_states,
)

_warned: set[str] = set()


def global_results(
    metrics: Sequence[Any],
    world: World,
    *,
    logs: Mapping[str, Any] | None = None,
    states: States | None = None,
    examples: float | None = None,
    last_examples: float | None = None,
    sources: Mapping[LogPath, LogSource | None] | None = None,
    of_step: bool = False,
) -> dict[str, Any]:
    """Results of `metrics` over the data of all ranks, without changing any rank's states.

    One 16-byte comparison of the metrics and log keys, then one fused sum.

    Args:
        metrics: `model.metrics`.
        world: the ranks; all of them call this function together.
        logs: the last step's logs. As in Keras they are the result, flattened, when their keys are
            not those of the metrics (a user's own `train_step`): a log that is a metric's result,
            by `sources` or else by its name, is computed from the states of all ranks; any other
            is averaged over ranks.
        states: a result of `take_states`, to use instead of the present states.
        examples: number of examples of this rank: the weight of results that can only be averaged.
            Default: the count of the loss metric.
        last_examples: those of them in the step of `logs`: the weight of logs that are averaged.
            Default: `examples`.
        sources: the metrics behind a log, by path; see `ktrainer.steps.metric_logs`. None: a log is
            the result of the metric of its name.
        of_step: keep a log that is no metric's also where the keys are those of the metrics. At the
            end of an epoch Keras puts the metric's result in its place; in logs of steps it stays.
            In one process the logs are then the result.

    Returns:
        Floats by name, in the metrics' order; arrays for results that are not scalar.

    Raises:
        DivergenceError: ranks have different metrics or log keys; it names them.
    """
    if of_step and logs and world.size == 1:  # no states are needed
        return _as_result(logs, _numbers(flatten_paths(logs)))
    states = take_states(metrics) if states is None else [list(s) for s in states]
    # Keras makes the compiled metrics at the first batch; before, they have no result.
    built = [i for i, m in enumerate(metrics) if getattr(m, "built", True)]
    of = [metrics[i] for i in built], [states[i] for i in built]
    reduction = _Reduction(*of, logs, world, sources)
    if world.size > 1:
        reduction.check()
        reduction.sum_over_ranks(examples, last_examples)
    return reduction.results(of_step)


class _Reduction:
    """One fused sum over ranks of states that add up, and of weighted values of the rest."""

    def __init__(
        self,
        metrics: list[Any],
        states: States,
        logs: Mapping[str, Any] | None,
        world: World,
        sources: Mapping[LogPath, LogSource | None] | None,
    ) -> None:
        self.metrics, self.states, self.world = metrics, states, world
        self.given = logs or {}
        given = flatten_paths(self.given)
        self.logs = _numbers(given)
        self.sources = {p: s for p, s in (sources or {}).items() if p in given}
        self._by_inner_name = sources is None
        self.leaves = [
            leaf for top, metric in enumerate(metrics) for leaf in metric_leaves(metric, top)
        ]

    def check(self) -> None:
        """Compare metrics and log keys between ranks; a difference raises on every rank."""
        here = [
            f"metric {leaf.metric.name!r} {[self.states[leaf.top][k].shape for k in leaf.span]}"
            for leaf in self.leaves
        ]
        here += [
            f"log {path_name(path)!r}" + ("" if path in self.extra else " of metrics")
            for path in sorted({*self.named, *self._of_metrics, *self.extra}, key=path_name)
        ]
        digest = zlib.crc32("\n".join(here).encode())
        both = np.array([digest, -digest], np.int64)
        highest, lowest = self.world.oob_allreduce(both, "max", "comparison of log keys")
        if highest == -lowest:
            return
        every = self.world.allgather(here, "comparison of log keys")
        common = set(every[0]).intersection(*every[1:])
        lines = [
            f"rank {rank} has {', '.join(extra)}, which not all ranks have"
            for rank, keys in enumerate(every)
            if (extra := sorted(set(keys) - common))
        ]
        raise DivergenceError(
            "metrics cannot be averaged, because ranks log different things: "
            + "; ".join(lines or ["the same keys in another order"])
            + ". Return the same logs from train_step and test_step on every rank."
        )

    def sum_over_ranks(self, examples: float | None, last_examples: float | None) -> None:
        weight = _examples(self.metrics, self.states) if examples is None else float(examples)
        last = weight if last_examples is None else float(last_examples)
        unknown = [leaf for leaf in self.leaves if not leaf.additive]
        _warn_once(leaf.metric.name for leaf in unknown)
        warn_of_assigned_states(leaf.metric for leaf in self.leaves)
        if self._by_inner_name:
            _warn_of_lists(path for path in self.extra if any(isinstance(key, int) for key in path))
        local = [self._local_result(leaf) for leaf in unknown]
        values = [(v, weight) for result in local for v in keras.tree.flatten(result)]
        values += [(self.logs[path], last) for path in self.extra]
        # 0 * nan is nan: a rank without examples must not change the mean.
        weighted = [np.float64(v) * w if w else np.zeros(np.shape(v)) for v, w in values]
        known = [(leaf.top, k) for leaf in self.leaves if leaf.additive for k in leaf.span]
        summed = [np.float64(self.states[top][k]) for top, k in known]
        first = 2 + len(weighted) - len(self.extra)
        total = _sum_fused([np.float64(weight), np.float64(last), *weighted, *summed], self.world)
        weight_of_all, last_of_all = (float(total[i]) or 1.0 for i in range(2))
        means = iter([v / weight_of_all for v in total[2:first]])
        for leaf, result in zip(unknown, local, strict=True):
            flat = [next(means) for _ in keras.tree.flatten(result)]
            leaf.averaged = keras.tree.pack_sequence_as(result, flat)
        for path, value in zip(self.extra, total[first:], strict=False):
            self.logs[path] = value / last_of_all
        for (top, k), value in zip(known, total[2 + len(weighted) :], strict=True):
            self.states[top][k] = value.astype(self.states[top][k].dtype)

    def _local_result(self, leaf: MetricLeaf) -> Any:
        return result_with(leaf.metric, [self.states[leaf.top][k] for k in leaf.span])

    @cached_property
    def named(self) -> set[LogPath]:
        """The paths of the logs that are results of metrics by their names."""
        names = {leaf.metric.name for leaf in self.leaves}
        rest = self.logs.keys() - self.sources.keys()
        named = {path for path in rest if self._name(path) in names}
        if rest - named:
            results = self._metric_results()
            named |= {path for path in rest - named if self._name(path) in results}
        return named

    @cached_property
    def extra(self) -> list[LogPath]:
        """The paths of the other scalar logs; arrays stay per rank."""
        others = self.logs.keys() - self.named - self._of_metrics
        return sorted((path for path in others if not self.logs[path].ndim), key=path_name)

    @cached_property
    def _of_metrics(self) -> set[LogPath]:
        """The paths of the logs that are computed from results of metrics, by `sources`."""
        return {path for path, source in self.sources.items() if source is not None}

    def _name(self, path: LogPath) -> str | None:
        """The name of the metric whose result a log may be."""
        inner = [key for key in path if isinstance(key, str)]
        return inner[-1] if inner and (self._by_inner_name or len(path) == 1) else None

    def results(self, of_step: bool) -> dict[str, Any]:
        found = self._metric_results()
        keeps_logs = of_step and None in self.sources.values()
        if not self.given or (set(self.given) == set(found) and not keeps_logs):
            return found
        values: dict[LogPath, Any] = dict(self.logs)
        if self.world.size > 1:
            values = {path: self.logs[path] for path in self.extra}
            names = {path: self._name(path) for path in self.named}
            values |= {path: found[name] for path, name in names.items() if name in found}
            for path, source in self.sources.items():
                if source is not None:
                    values[path] = source.of([self._result_of(m) for m in source.metrics])
        return _as_result(self.given, values)

    def _result_of(self, metric: Any) -> Any:
        """The result over all ranks of one of the metrics, which may be a compiled one."""
        (leaf,) = (leaf for leaf in self.leaves if leaf.metric is metric)
        return self._local_result(leaf) if leaf.averaged is None else leaf.averaged

    def _metric_results(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for top, metric in enumerate(self.metrics):
            result = result_with(metric, self.states[top])
            for leaf in self.leaves:
                if leaf.top != top or leaf.averaged is None:
                    continue
                if leaf.entry is None:
                    result = leaf.averaged
                else:
                    result[list(result)[leaf.entry]] = leaf.averaged
            found.update(_named(metric.name, result))
        return found


def _numbers(values: Mapping[LogPath, Any]) -> dict[LogPath, np.ndarray]:
    return {p: n for p, v in values.items() if (n := as_number(v)) is not None}


def _as_result(logs: Mapping[str, Any], values: Mapping[LogPath, Any]) -> dict[str, Any]:
    """Values in the structure of `logs`, flattened as Keras does."""
    return as_keras_flattens(unflatten_paths(logs, {p: _plain(v) for p, v in values.items()}))


def _plain(value: Any) -> Any:
    array = as_number(value)
    return float(array) if array is not None and array.ndim == 0 else array


def _sum_fused(values: Sequence[Any], world: World) -> list[np.ndarray]:
    """Sum arrays over ranks in float64, all in one collective."""
    arrays = [np.asarray(value, np.float64) for value in values]
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    total = world.oob_allreduce(flat, "sum", "sum of metric states")
    ends = itertools.accumulate(array.size for array in arrays)
    return [
        total[end - array.size : end].reshape(array.shape)
        for array, end in zip(arrays, ends, strict=True)
    ]


def _examples(metrics: Sequence[Any], states: States) -> float:
    """Examples seen, from the count of the loss metric; 1 when there is none."""
    for metric, values in zip(metrics, states, strict=True):
        if isinstance(metric, keras.metrics.Mean) and metric.name == "loss":
            return float(values[1])
    return 1.0


def _named(name: str, result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        return {name: _plain(result)}
    named: dict[str, Any] = {}
    for key, value in result.items():
        named.update(_named(key, value))
    return named


def _warn_once(names: Iterable[str]) -> None:
    new = sorted(set(names) - _warned)
    if new:
        _warned.update(new)
        warnings.warn(
            f"averaging the results of {', '.join(new)} over ranks, weighted by examples: that is "
            "not the metric over all data. If its states can be summed over ranks, set "
            "`state_adds_up = True` on the metric's class.",
            stacklevel=5,
        )


def _warn_of_lists(paths: Iterable[LogPath]) -> None:
    new = sorted({path_name(path) for path in paths} - _warned)
    if new:
        _warned.update(new)
        warnings.warn(
            f"averaging the logs {', '.join(new)} over ranks, weighted by the examples of the last "
            "step: in a list they have no names by which to find their metrics. If they are the "
            "results of metrics, log them by name, in a dict.",
            stacklevel=5,
        )
