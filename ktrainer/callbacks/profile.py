"""Write a trace of some steps: what every rank did when, on one clock.

Events used: `on_step_begin` (start), `on_step_end` (stop after the last one, gather from all ranks
and write), `on_restore` (begin again), `on_train_end`, `close`.

The file has Chrome's trace event format, which Perfetto reads: a process for each rank, with a lane
for each kind of span.
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
from ktrainer.distributed.clock_offsets import ClockOffsets, clock_offsets
from ktrainer.runtime.run_folder import write_private
from ktrainer.state import trace_spans
from ktrainer.state.progress import Progress
from ktrainer.state.trace_spans import Span
from ktrainer.steps.variable_placement import placement_of

NAME = "trace.json"
STEPS = "steps"  # the lane with a span for each step


class Profile(Callback):
    """Trace the updates `first` to `last`, counted from 1. Needs a trainer.

    Args:
        tensorflow: with the operations that TensorFlow's profiler sees.
    """

    def __init__(self, first: int, last: int, tensorflow: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.tensorflow = first, last, tensorflow
        self._offsets: ClockOffsets | None = None  # while steps are traced
        self._operations: _Operations | None = None
        self._began = 0.0

    def max_updates_per_call(self) -> int | None:
        step = self.progress.step
        if step >= self.last:
            return None
        return max(1, self.first - 1 - step)

    def on_step_begin(self, step: int) -> None:
        if self._offsets is None and self._reaches(step):
            self._offsets = clock_offsets(self.world)
            if self.tensorflow:
                self._operations = _Operations.start(self._profile_folder())
            trace_spans.start()
        self._began = time.perf_counter()

    def _reaches(self, step: int) -> bool:
        """Whether the call after `step` updates makes one that is to be traced."""
        several = self.trainer.config.trainer.steps_per_call
        return step < self.last and step + (1 if several == "auto" else several) >= self.first

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._offsets is None:
            return
        trace_spans.add_span(STEPS, f"step {step}", self._began, time.perf_counter())
        if step >= self.last:
            self._finish()

    def on_restore(self, progress: Progress) -> None:
        self.close()  # it begins again: with the ranks that there are now, if these have changed

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._offsets is not None:  # ended before the last of them
            self._finish()

    def close(self) -> None:
        if self._offsets is not None:
            trace_spans.stop()
        if self._operations is not None:
            self._operations.stop()
        self._operations = self._offsets = None

    def _finish(self) -> None:
        """Stop, gather what all ranks have traced, and write it."""
        assert self._offsets is not None
        spans, offsets = trace_spans.stop(), self._offsets
        if self._operations is not None:
            self._operations.stop()
            spans += self._operations.spans()
        self._operations = self._offsets = None
        placement = placement_of(self.model)
        mine = {
            "host": socket.gethostname(),
            "partition": None if placement is None else placement.partition,
            "spans": [(each.lane, each.name, each.begin, each.end) for each in spans],
        }
        ranks = self.world.allgather(mine, "trace")
        path = self.run_path(NAME)
        if self.world.is_root and path is not None:
            _write(path, trace_of(ranks, offsets))

    def _profile_folder(self) -> Path:
        assert self.run_dir is not None
        return self.run_dir / "tensorflow-profile" / f"rank-{self.world.rank}"


def trace_of(ranks: Sequence[Mapping[str, Any]], offsets: ClockOffsets) -> dict[str, Any]:
    """The trace in Chrome's format, its times in microseconds since the first span."""
    spans = [
        (rank, lane, name, begin + offset, end + offset)
        for rank, (each, offset) in enumerate(zip(ranks, offsets.seconds, strict=True))
        for lane, name, begin, end in each["spans"]
    ]
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
    about = {
        "clock_error_seconds": offsets.error,
        "partitions": [each["partition"] for each in ranks],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}}


def _write(path: Path, trace: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; a disk that refuses it ends no training."""
    try:
        write_private(path, json.dumps(trace))
    except OSError as error:
        warnings.warn(f"the trace {path} cannot be written: {error.strerror}", stacklevel=2)


class _Operations:
    """A session of TensorFlow's profiler, of which a process has one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
            warnings.warn(
                f"the trace lacks TensorFlow's operations: {error.message}. Another callback may "
                "profile at the same time.",
                stacklevel=2,
            )
            return None

    def stop(self) -> None:
        """End the session. Its own files stay, for TensorBoard."""
        tf.profiler.experimental.stop()

    def spans(self) -> list[Span]:
        """What it has seen, once it has ended."""
        paths = sorted(self._folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        return list(self._read(paths[-1])) if paths else []

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


def _start_of(plane: Any) -> int:
    """Nanoseconds since 1970 at which the session began, where a plane has that; else 0."""
    for stat in plane.stats:
        if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
            return int(stat.uint64_value or stat.int64_value)
    return 0
