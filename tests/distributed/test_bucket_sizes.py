"""Buckets that suit the links between hosts: their sizes, their bits, and the links as measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktrainer.distributed.bucket_sizes import BucketSizes, depend_on_links, suitable_sizes
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.launch.mpirun_command import find_mpirun
from tests.dist.harness.group import ROOT
from tests.dist.harness.hosts import INTERFACE, Hosts
from tests.distributed.test_gradients import _gradients, _overlap, _reduced
from tests.distributed.test_host_groups import on_hosts
from tests.processes import warm_python_on

SIZES = [(1e-6, 1e-6), (0.001, 0.3), (1.0, 1.2), (1.0, 7.0), (25.0, 25.0)]
MEASURES = """
import json, sys, time
from ktrainer.distributed import open_world
from ktrainer.distributed.link_speed import link_speeds
from ktrainer.distributed.mpi_gradients import MpiGradients

world = open_world(60.0)
world.barrier()


def measured():
    start = time.perf_counter()
    ((ranks, (latency, bandwidth)),) = link_speeds(world).items()
    return time.perf_counter() - start, ranks, latency, latency + 2**20 / bandwidth


# Other tests on these cores make some messages slower, short ones or long ones.
seconds, ranks, latency, long = map(min, zip(*(measured() for _ in range(int(sys.argv[1])))))
bandwidth = 2**20 / (long - latency)
sums = MpiGradients(world, None)
chosen = world.allgather((sums._first_bytes, sums._bucket_bytes))
if world.rank == 0:
    print(json.dumps([seconds, ranks, latency, bandwidth, chosen]), flush=True)
"""


def test_fixed_costs_are_a_tenth_of_a_transfer() -> None:
    at_ten_gigabits = suitable_sizes(50e-6, 1.25e9)
    assert at_ten_gigabits == BucketSizes(1.0, pytest.approx(10 * 1.1e-3 * 1.25e9 / 2**20))
    assert suitable_sizes(50e-6, 12.5e6) == BucketSizes(1.0, 1.0)
    assert suitable_sizes(50e-6, 12.5e9) == BucketSizes(1.0, 25.0)
    assert suitable_sizes(20e-3, 125e6) == BucketSizes(1.0, 25.0)


def test_where_bits_depend_on_buckets_these_depend_on_no_measurement() -> None:
    assert [depend_on_links(hosts, 1) for hosts in (1, 2, 64, 65)] == [False, True, True, False]
    assert [depend_on_links(2, fullest) for fullest in (1, 64, 65)] == [True, True, False]
    assert depend_on_links(64, 2)
    assert [depend_on_links(hosts, 2, hierarchical=False) for hosts in (32, 33)] == [True, False]


def _with_sizes(layout: str) -> list[list[bytes]]:
    found = []
    with on_hosts(layout) as world:
        sums = MpiGradients(world, None)
        for sizes in [BucketSizes(sums._first_bytes / 2**20, sums._bucket_bytes / 2**20), *SIZES]:
            sums.set_wire("none", BucketSizes(*sizes))
            reduced = _reduced(sums, _gradients("float32", world.rank), 0.5 + world.rank)
            found.append([x.tobytes() for x in reduced])
        sums.close()
    return found


@pytest.mark.parametrize("layout", ["abc", "aab", "abcd", "aabb", "abab", "aaab"])
def test_bits_do_not_depend_on_bucket_sizes(ranks: Callable[..., Any], layout: str) -> None:
    first, *others = [each for rank in ranks(len(layout)).run(_with_sizes, layout) for each in rank]
    assert all(other == first for other in others)


def _overlap_between_hosts() -> list[float]:
    with on_hosts("ab"):
        return _overlap("dense", None)


def test_sums_between_hosts_begin_before_the_last_gradient_is_there(
    ranks: Callable[..., Any],
) -> None:
    """By default: the early gradient has 256 KiB, the late one 2 MiB."""
    assert ranks(2).run(_overlap_between_hosts) == [[2.0 * 1024 * 512, 4.0 * 64 * 1024]] * 2


def _sizes(layout: str) -> tuple[int, int]:
    with on_hosts(layout) as world:
        sums = MpiGradients(world, None)
        sums.close()
        return sums._first_bytes, sums._bucket_bytes


def test_ranks_of_one_host_have_large_buckets_all_ranks_the_same(ranks: Callable[..., Any]) -> None:
    assert ranks(3).run(_sizes, "aaa") == [(25 * 2**20, 25 * 2**20)] * 3
    (first, other), *rest = ranks(3).run(_sizes, "aab")
    assert first == 2**20 <= other <= 25 * 2**20
    assert rest == [(first, other)] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("megabits", [1000, 100])
def test_a_slow_link_is_measured(
    hosts: Callable[[int], Hosts], tmp_path: Path, megabits: int
) -> None:
    made = hosts(2)
    for host in range(2):
        # After a pause an eighth of a long message passes at once: it seems up to 14 % too fast.
        made.slow(host, rate=f"{megabits}mbit", burst="128kb")
    script = tmp_path / "measures.py"
    script.write_text(MEASURES)
    mca = {"pml": "ob1", "btl": "tcp,self,sm", "btl_tcp_if_include": INTERFACE}
    mca["btl_tcp_links"] = "2"  # as `ktrainer run` has it: else one direction waits for the other
    done = made.run(
        0,
        *(find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "--map-by", "node"),
        *("--host", ",".join(f"{name}:1" for name in made.names), "-n", 2),
        *("--prtemca", "plm_ssh_agent", made.agent, "--prtemca", "prte_if_include", INTERFACE),
        *(word for key, value in mca.items() for word in ("--mca", key, value)),
        *("--mca", "mpi_yield_when_idle", "1", "-x", f"PYTHONPATH={ROOT}"),
        # A transfer takes 8 ms or 84 ms.
        *(warm_python_on(made), script, 25 if megabits == 1000 else 5),
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seconds, ranks, latency, bandwidth, chosen = json.loads(done.stdout.splitlines()[-1])
    assert ranks == [0, 1]
    assert bandwidth == pytest.approx(megabits * 1e6 / 8, rel=0.2)
    assert 0 < latency < 0.02
    assert seconds < (0.2 if megabits == 1000 else 1.0)
    assert chosen[0] == chosen[1]
    assert chosen[0][0] == 2**20
