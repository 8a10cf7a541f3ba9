"""A world without MPI: collectives, and processes that are missing, lost or unknown."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness.group import ROOT
from tests.processes import python

_STRIDE = 8  # ports from one that is tried to the next

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
from ktrainer.config.cluster_environment import ClusterSpec
from ktrainer.distributed.cluster_world import ClusterWorld
from ktrainer.errors import WorldError

rank, addresses, what = int(sys.argv[1]), tuple(sys.argv[2].split(",")), sys.argv[3]
world = ClusterWorld(ClusterSpec({"worker": addresses}, "worker", rank), float(sys.argv[4]))
world.deadline = 3.0
assert (world.rank, world.size, world.local_rank) == (rank, len(addresses), rank)
if what == "collectives":
    assert world.allgather({"rank": rank}) == [{"rank": r} for r in range(world.size)]
    assert world.broadcast(f"from {rank}", root=world.size - 1) == f"from {world.size - 1}"
    mine = np.arange(4, dtype=np.float32) * (rank + 1)
    every = [np.arange(4, dtype=np.float32) * (r + 1) for r in range(world.size)]
    for op, expected in (("sum", sum(every)), ("average", sum(every) / np.float32(world.size)),
                         ("min", np.min(every, 0)), ("max", np.max(every, 0))):
        found = world.oob_allreduce(mine, op)
        assert found.dtype == np.float32, op
        np.testing.assert_array_equal(found, expected, err_msg=op)
    assert world.any(rank == 1) and not world.any(False)
    assert float(world.oob_allreduce(rank)) == (world.size - 1) / 2
    world.barrier()
    world.close()
    world.close()
elif what == "paths":
    world.step = 7
    world.barrier("one way" if rank == 0 else "another way")
elif what == "late":
    world.deadline = 0.5
    gave_up = Path(sys.argv[5])
    while rank == 1 and not gave_up.exists():
        time.sleep(0.02)
    for _ in range(2):
        try:
            print(world.oob_allreduce(rank), flush=True)
        except WorldError as error:
            print(type(error.__cause__).__name__, str(error).splitlines()[0], flush=True)
        gave_up.touch()
else:
    world.step = 7
    print("ready", flush=True)
    for _ in range(1000):
        world.barrier("a wait")
        time.sleep(0.01)
"""


def free_ports(count: int) -> list[int]:
    """Ports in a row at which nothing listens, and which the system gives to nobody meanwhile;
    each process of a parallel test run has others."""
    assert count <= _STRIDE
    for first in itertools.islice(_first_ports(), 1000 // _STRIDE):
        ports = range(first, first + count)
        with suppress(OSError), ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(ports)
    raise AssertionError(f"no {count} free ports in a row")


@functools.cache
def _first_ports() -> Iterator[int]:
    """Again and again, not from the first: other test runs may look for some too."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    least = 10_000 + 1000 * (int(worker.removeprefix("gw")) % 10)
    firsts = [*range(least, least + 1000, _STRIDE)]
    begin = os.getpid() % len(firsts)
    return itertools.cycle(firsts[begin:] + firsts[:begin])


@contextmanager
def started(
    what: str,
    size: int,
    *more: object,
    but: tuple[int, ...] = (),
    keys: dict[int, str] | None = None,
    start_timeout: float = 20.0,
) -> Iterator[dict[int, Any]]:
    """The ranks of a cluster, without those in `but`; the script reads `more` of its arguments."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(size))
    processes, arguments = {}, (start_timeout, *more)
    try:
        for rank in range(size):
            if rank in but:
                continue
            key = (keys or {}).get(rank)
            processes[rank] = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *map(str, (rank, addresses, what, *arguments))],
                cwd=ROOT,
                env={**os.environ, **({"KTRAINER_CLUSTER_KEY": key} if key else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size: int) -> None:
    with started("collectives", size) as ranks:
        for process in ranks.values():
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said


@pytest.mark.quick("2-0")
@pytest.mark.parametrize(("missing", "by"), [(2, 0), (0, 1)])
def test_a_process_that_is_missing_at_the_start_is_named(missing: int, by: int) -> None:
    start = time.monotonic()
    with started("collectives", 3, but=(missing,), start_timeout=5.0) as ranks:
        _, said = ranks[by].communicate(timeout=60)
        assert ranks[by].returncode == 1
    assert time.monotonic() - start < 30
    assert f"Not there: rank {missing} (127.0.0.1:" in said
    assert "backend.start_timeout" in said


@pytest.mark.quick("9-1")
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_process_that_ends_or_stops_is_named_by_all(number: int, victim: int) -> None:
    with started("wait", 3) as ranks:
        for process in ranks.values():
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        ranks[victim].send_signal(number)
        start = time.monotonic()
        for rank in {0, 1, 2} - {victim}:
            _, said = ranks[rank].communicate(timeout=30)
            assert f"rank {victim} (127.0.0.1:" in said
            assert "at step 7 in 'a wait'" in said
        assert time.monotonic() - start < 15


def test_different_paths_are_found() -> None:
    with started("paths", 2) as ranks:
        for process in ranks.values():
            _, said = process.communicate(timeout=60)
            assert "rank 1 in 'another way'" in said


def test_after_a_deadline_a_rank_can_no_longer_communicate(tmp_path: Path) -> None:
    """The answer to a late sum would be taken for that to the next one."""
    with started("late", 2, tmp_path / "gave up") as processes:
        for rank, process in processes.items():
            waited, then = process.communicate(timeout=60)[0].splitlines()
            assert "rank 0 waited 0.5 s" in waited
            assert f"DeadlineExceeded rank {rank} can no longer communicate" in then


@pytest.mark.exhaustive
def test_a_silent_server_at_the_address_is_not_waited_for() -> None:
    """As a notebook server on Slurm's port would."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:1"
        done = python("-c", SCRIPT, 1, addresses, "collectives", 5, seconds=60)
        assert "Not there: rank 0" in done.stderr
        done = python("-c", SCRIPT, 0, addresses, "collectives", 5, seconds=60)
        assert "cannot listen at 127.0.0.1:" in done.stderr
        assert "KTRAINER_PORT" in done.stderr


@pytest.mark.exhaustive
def test_processes_with_another_key_are_refused() -> None:
    keys = {0: "secret", 1: "guess"}
    with started("collectives", 2, keys=keys, start_timeout=5.0) as ranks:
        _, said = ranks[1].communicate(timeout=60)
        assert "same KTRAINER_CLUSTER_KEY" in said
        _, said = ranks[0].communicate(timeout=60)
        assert "Not there: rank 1" in said
