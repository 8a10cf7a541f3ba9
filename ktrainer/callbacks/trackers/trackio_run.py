"""A run in Trackio, in its local folder or on a Space.

Trackio writes in a thread every half second. A run is known by its name, which holds our token. Its
local store tells the last step that it has; of a Space or server we know only what we have sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktrainer.callbacks.trackers.tracker_run import Point, RunFacts, TrackerRun
from ktrainer.callbacks.trackers.wandb_run import refuse_unknown


class TrackioRun(TrackerRun):
    """Rows as the log of a run; settings, facts and the diff as its config."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        import trackio

        name = f"{arguments.get('name') or facts.name}-{facts.token}"
        config = {"settings": facts.settings, **facts.more}
        if facts.diff:
            config["diff"] = facts.diff
        given = {"project": "ktrainer", "embed": False, **arguments, "name": name}
        self._is_remote, self._sent = bool({"space_id", "server_url"} & given.keys()), facts.sent
        self._run = trackio.init(config=config, resume="allow", **given)

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        import trackio

        refuse_unknown(arguments, trackio.init, "trackio")

    def held(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        if self._is_remote:
            return self._sent
        run = self._run
        last = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.id)
        return -1 if last is None else int(last)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self, reason: str | None) -> None:
        self._run.finish()
