"""What Linux counts of this process: processors that it did not get, and memory read from disk."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktrainer.runtime.process_usage import disk_faults, processor_share, processor_time


def test_a_process_that_shares_its_core_gets_a_part_of_it() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    spin = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    spinner = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert spinner.stdout is not None
        spinner.stdout.readline()
        os.sched_setaffinity(0, {core})
        outer, since, inner = time.monotonic(), processor_time(), time.monotonic()
        while time.monotonic() < inner + 0.5:
            pass
        least, (share, waited) = time.monotonic() - inner, processor_share(since)
        most = time.monotonic() - outer
    finally:
        os.sched_setaffinity(0, before)
        spinner.kill()
        spinner.communicate()
    assert share is not None
    assert 0.0 < share < 0.75
    # Of this one thread; it may be paused beside any of these lines.
    assert least * (1 - share) - 0.05 <= waited <= most * (1 - share) + 0.05


def test_pages_that_are_read_from_the_disk_count(tmp_path: Path) -> None:
    path, pages = tmp_path / "memory", 256
    path.write_bytes(os.urandom(pages * mmap.PAGESIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)  # no page is read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            before = disk_faults()
            for page in range(pages):
                memory[page * mmap.PAGESIZE]
            read = disk_faults() - before
    if not read:
        pytest.skip("this file system keeps its pages in memory")
    assert pages / 2 <= read <= 2 * pages
