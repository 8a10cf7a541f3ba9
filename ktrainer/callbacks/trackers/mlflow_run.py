"""A run in MLflow, in a database, on a server, or in a folder.

Rows are written with MLflow's client, which returns when they are stored. A run is found again by
its tag `ktrainer.run`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ktrainer.callbacks.trackers.tracker_run import Point, RunFacts, TrackerRun
from ktrainer.state.nested_logs import flat

_TAG = "ktrainer.run"
_AT_ONCE = 1000  # metrics, and a tenth of them parameters: MLflow's limits
_LONGEST = 500  # characters of a parameter, in the oldest servers
_OTHER = re.compile(r"[^\w\-. :]")  # characters that a name may not have
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MlflowRun(TrackerRun):
    """Rows as metrics, settings as parameters, the facts and the diff as artifacts.

    A parameter cannot be changed, so those of the first start stay; `facts.json` is that of the
    last.
    """

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(arguments.get("tracking_uri"))
        experiment = self._experiment(arguments.get("experiment"))
        query = f"tags.`{_TAG}` = '{facts.token}'"
        found = self._client.search_runs([experiment], query, max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
        else:
            tags = {_TAG: facts.token, **arguments.get("tags", {})}
            run_name = arguments.get("run_name") or facts.name
            made = self._client.create_run(experiment, tags=tags, run_name=run_name)
            self._id = made.info.run_id
            self._log_parameters(facts)
        self._client.log_dict(self._id, {"settings": facts.settings, **facts.more}, "facts.json")
        if facts.diff:
            self._client.log_text(self._id, facts.diff, "code.diff")
        keys = self._client.get_run(self._id).data.metrics
        self._last = {key: self._last_step(key) for key in keys}

    def _experiment(self, name: str | None) -> str:
        name = name or "Default"
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def _log_parameters(self, facts: RunFacts) -> None:
        from mlflow.entities import Param

        values = flat(facts.settings) | flat(facts.more)
        named = {_name(key): str(value)[:_LONGEST] for key, value in values.items()}
        parameters = [Param(key, value) for key, value in named.items()]
        for i in range(0, len(parameters), _AT_ONCE // 10):
            self._client.log_batch(self._id, params=parameters[i : i + _AT_ONCE // 10])

    def _last_step(self, key: str) -> int:
        history = self._client.get_metric_history(self._id, key)
        return max((metric.step for metric in history), default=-1)

    def held(self) -> int:
        """The step before the last: of the last, some metrics may be missing."""
        return max(self._last.values(), default=0) - 1

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for point in points:
            for name, value in point.values.items():
                part, _, rest = name.partition("/")
                key = f"{part}/{_name(rest)}"  # a store of files has one folder a part
                if point.step > self._last.get(key, -1):
                    metrics.append(Metric(key, value, round(point.time * 1000), point.step))
        for i in range(0, len(metrics), _AT_ONCE):
            sent = metrics[i : i + _AT_ONCE]
            self._client.log_batch(self._id, metrics=sent)
            self._last |= {metric.key: metric.step for metric in sent}

    def close(self, reason: str | None) -> None:
        self._client.set_terminated(self._id, _STATUS.get(reason or "interrupted", "FAILED"))


def _name(text: str) -> str:
    return _OTHER.sub(".", text)
