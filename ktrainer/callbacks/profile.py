"""Write a trace of some steps: what every rank did when, on one clock.

Events used: `on_step_begin` (start), `on_step_end` (stop after the last one, gather from all ranks
and write), `on_restore` (begin again), `on_train_end` (write what there is, or warn that there is
none), `close`.

The file has Chrome's trace event format, which Perfetto reads: a process for each rank, with a lane
for each kind of span. Clocks are compared before the first span and after the last one, as clocks
of two hosts drift apart in between.
"""

from __future__ import annotations

import json
import socket
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ktrainer.callbacks.base import Callback
from ktrainer.distributed.clock_offsets import clock_offset
from ktrainer.distributed.world import World
from ktrainer.runtime.private_file import write_private
from ktrainer.state import trace_spans
from ktrainer.state.progress import Progress
from ktrainer.state.trace_spans import Span
from ktrainer.steps.variable_placement import placement_of

NAME = "trace.json"


class Profile(Callback):
    """Trace the updates `first` to `last`, counted from 1. Needs a trainer.

    A `fit` that a callback calls is not traced: it is a part of the outer one.

    Args:
        tensorflow: with the operations that TensorFlow's profiler sees.
    """

    def __init__(self, first: int, last: int, tensorflow: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.tensorflow = first, last, tensorflow
        self._clock: _FirstClock | None = None  # while steps are traced
        self._operations: _Operations | None = None
        self._began = 0.0
        self._step = 0  # before the call
        self._written = False

    def max_updates_per_call(self) -> int | None:
        step = self.progress.step
        if step >= self.last:
            return None
        return max(1, self.first - 1 - step)

    def on_step_begin(self, step: int) -> None:
        if self._clock is None and self._reaches(step):
            self._clock = _FirstClock(self.world)
            if self.tensorflow:
                self._operations = _Operations.start(self._profile_folder())
            trace_spans.start()
        self._began, self._step = time.perf_counter(), step

    def _reaches(self, step: int) -> bool:
        """Whether the call after `step` updates makes one that is to be traced."""
        if self.train_state.inside:
            return False
        several = self.trainer.config.trainer.steps_per_call
        return step < self.last and step + (1 if several == "auto" else several) >= self.first

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._clock is None:
            return
        one = step == self._step + 1
        name = f"step {step}" if one else f"steps {self._step + 1}-{step}"
        trace_spans.add_span(trace_spans.STEPS, name, self._began, time.perf_counter())
        if step >= self.last:
            self._finish()

    def on_restore(self, progress: Progress) -> None:
        self.close()  # it begins again: with the ranks that there are now, if these have changed

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._clock is not None:  # ended before the last of them
            self._finish()
        elif not (self._written or self.train_state.inside) and self.world.is_root:
            self._warn_of_none()

    def _warn_of_none(self) -> None:
        """Say that nothing was traced; an earlier start of the run may have done it."""
        step, path = self.progress.step, self.run_path(NAME)
        if step >= self.first and path is not None and _steps_of(path) == self._steps:
            return
        why = f"training has ended after {step} updates"
        if step >= self.first:
            why = "training has resumed after them, or ranks were lost at the last one"
        said = f"no trace of trainer.profile.steps={self._steps} is written: {why}"
        warnings.warn(said, stacklevel=2)

    @property
    def _steps(self) -> str:
        return f"{self.first}-{self.last}"

    def close(self) -> None:
        if self._clock is not None:
            trace_spans.stop()
        if self._operations is not None:
            self._operations.stop()
        self._operations = self._clock = None

    def _finish(self) -> None:
        """Stop, gather what all ranks have traced, and write it."""
        assert self._clock is not None
        spans, clock = trace_spans.stop(), self._clock
        if self._operations is not None:
            spans += self._operations.stop()
        self._operations = self._clock = None
        clock.compare_again()
        placement = placement_of(self.model)
        mine = {
            "host": socket.gethostname(),
            "partition": None if placement is None else placement.partition,
            "spans": [(s.lane, s.name, clock.of(s.begin), clock.of(s.end)) for s in spans],
        }
        ranks = self.world.allgather(mine, "trace")
        path, self._written = self.run_path(NAME), True
        if self.world.is_root and path is not None:
            about = {"steps": self._steps, "clock_error_seconds": clock.error}
            _write(path, trace_of(ranks, about))

    def _profile_folder(self) -> Path:
        assert self.run_dir is not None
        return self.run_dir / "tensorflow-profile" / f"rank-{self.world.rank}"


class _FirstClock:
    """The clock of rank 0, for times of this rank's. All ranks make and use it together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._first = clock_offset(world)
        self._drift = 0.0  # of the offset, in seconds a second
        self.error = self._first.error

    def compare_again(self) -> None:
        """Measure how the two clocks have drifted apart."""
        first, now = self._first, clock_offset(self._world)
        self._drift = (now.seconds - first.seconds) / (now.moment - first.moment)
        self.error = max(first.error, now.error)

    def of(self, moment: float) -> float:
        """A moment of this rank's clock."""
        return moment + self._first.seconds + self._drift * (moment - self._first.moment)


def trace_of(ranks: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace in Chrome's format, its times in microseconds since the first span.

    Args:
        ranks: of each rank its host, its partition of the model, and its spans.
        about: what else the file says.
    """
    spans = [(rank, *span) for rank, each in enumerate(ranks) for span in each["spans"]]
    origin = min((begin for _, _, _, begin, _ in spans), default=0.0)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(s[1] for s in spans))}
    events: list[dict[str, Any]] = []
    for rank, each in enumerate(ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank} ({each['host']})"))
        own = dict.fromkeys(lane for lane, _, _, _ in each["spans"])
        events += [_named("thread_name", rank, lanes[lane], lane) for lane in own]
    for rank, lane, name, begin, end in spans:
        micros = {"ts": round((begin - origin) * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
        events.append(
            {"ph": "X", "pid": rank, "tid": lanes[lane], "cat": lane, "name": name, **micros}
        )
    partitions = [each["partition"] for each in ranks]
    about = {**about, "partitions": partitions}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}}


def _write(path: Path, trace: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; a disk that refuses it ends no training."""
    try:
        write_private(path, json.dumps(trace))
    except OSError as error:
        warnings.warn(f"the trace {path} cannot be written: {error.strerror}", stacklevel=2)


def _steps_of(path: Path) -> str | None:
    """The steps that a trace was asked for; None where there is no trace."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["otherData"]["steps"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


class _Operations:
    """A session of TensorFlow's profiler, of which a process has one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.perf_counter()
        self._monotonic = time.perf_counter() - time.time()  # on top of its clock
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        tf.profiler.experimental.start(str(folder), options=options)

    @classmethod
    def start(cls, folder: Path) -> _Operations | None:
        """Begin a session; None, with a warning, where there is one already."""
        try:
            return cls(folder)
        except tf.errors.OpError as error:
            _warn_of_operations(error.message)
            return None

    def stop(self) -> list[Span]:
        """End the session, whose own files stay, for TensorBoard; return what it has seen.

        What fails is warned of: another callback's session, a full disk, files of an unknown kind.
        """
        ended = time.perf_counter()
        try:
            tf.profiler.experimental.stop()
            paths = sorted(self._folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
            found = list(self._read(paths[-1])) if paths else []
        except Exception as error:  # of TensorFlow's, protobuf's or the disk's
            _warn_of_operations(getattr(error, "message", None) or str(error))
            return []
        spans = [span for span in found if span.end >= self._began and span.begin <= ended]
        if not spans:
            _warn_of_operations("its profiler has seen none in these steps")
        return spans

    def _read(self, path: Path) -> Iterable[Span]:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        start = max((_start_of(plane) for plane in space.planes), default=0)
        for plane in space.planes:
            for line in plane.lines:
                lane = f"TensorFlow: {line.name or plane.name}"
                base = (start + line.timestamp_ns) / 1e9 + self._monotonic
                for event in line.events:
                    begin = base + event.offset_ps / 1e12
                    if event.duration_ps:
                        name = plane.event_metadata[event.metadata_id].name
                        yield Span(lane, name, begin, begin + event.duration_ps / 1e12)


def _warn_of_operations(why: str) -> None:
    warnings.warn(
        f"the trace lacks TensorFlow's operations: {why}. A process has one profiler at a time: "
        "another callback may have used it.",
        stacklevel=3,
    )


def _start_of(plane: Any) -> int:
    """Nanoseconds since 1970 at which the session began, where a plane has that; else 0."""
    for stat in plane.stats:
        if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
            return int(stat.uint64_value or stat.int64_value)
    return 0
