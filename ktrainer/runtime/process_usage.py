"""Processor time and page faults of this process, by Linux's own counters."""

from __future__ import annotations

import os
import resource

_TASKS = "/proc/self/task"


def disk_faults() -> int:
    """Page faults so far that had to read the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def processor_time() -> tuple[int, int]:
    """Nanoseconds that the present threads have run, and that they were ready to run but waited
    for a processor. Zeros where the kernel does not count them. Takes about 6 us a thread."""
    ran = waited = 0
    try:
        tasks = os.listdir(_TASKS)
    except OSError:
        return 0, 0
    for task in tasks:
        try:
            with open(f"{_TASKS}/{task}/schedstat", "rb", buffering=0) as file:
                words = file.read().split()
        except OSError:  # the thread has ended
            continue
        ran, waited = ran + int(words[0]), waited + int(words[1])
    return ran, waited


def processor_share(before: tuple[int, int]) -> tuple[float | None, float]:
    """The part that this process got of the processor time that its threads asked for since
    `before`, which `processor_time` has returned, and the seconds that they waited for it; None
    where it is not known."""
    ran, waited = (now - then for now, then in zip(processor_time(), before, strict=True))
    if ran <= 0 or waited < 0:
        return None, 0.0
    return ran / (ran + waited), waited / 1e9
