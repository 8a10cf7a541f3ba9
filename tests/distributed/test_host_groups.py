"""Hierarchical sums: ranks that are told host names, and ranks in networks of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.distributed import host_groups, open_world
from ktrainer.errors import DeadlineExceeded
from ktrainer.launch.mpirun_command import find_mpirun
from tests.dist.harness.group import ROOT
from tests.dist.harness.hosts import INTERFACE, Hosts
from tests.faults.test_healing import launch
from tests.processes import warm_python_on

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Numbers of elements that no number of hosts divides; the last takes several buffers of memory.
SHAPES = [(5, 7), (0, 3), (), (90_001,), (600_001,)]
LAYOUTS = ["aab", "abb", "aba", "aabb", "abab", "abca", "aaab"]
FLAT = ["aaa", "abc", "aaaa", "abcd"]


@contextmanager
def on_hosts(layout: str) -> Iterator[Any]:
    """The world, whose ranks believe to be on these hosts."""
    world: Any = open_world(20.0)
    name = host_groups.host_name
    host_groups.host_name = lambda: layout[world.rank]
    try:
        yield world
    finally:
        host_groups.host_name = name


def _given(rank: int, dtype: Any) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [np.asarray(random.normal(size=shape)).astype(dtype) for shape in SHAPES]


def _sums(layouts: list[str], dtype: str, compression: str) -> list[tuple[bool, Any, Any]]:
    """For each layout: whether sums are hierarchical; those in new arrays, and in place."""
    from ktrainer.distributed.mpi_gradients import MpiGradients

    every = []
    for layout in layouts:
        with on_hosts(layout) as world:
            collectives = MpiGradients(world, compression=compression)
            arrays = _given(world.rank, tf.as_dtype(dtype).as_numpy_dtype)
            weight = 0.5 + world.rank
            if world.rank == 1:
                weight, arrays = 0.0, [np.full_like(array, np.nan) for array in arrays]
            new = collectives.sum_bucket(np.array(weight), *(np.copy(array) for array in arrays))
            collectives.reduce_in_place(arrays, weight)
            every.append((collectives.communicators.hosts is not None, new, arrays))
            collectives.close()
    return every


def _weighted(rank: int, dtype: Any) -> list[np.ndarray]:
    """In float32 for 16 bits, as they are summed within a host."""
    wide = np.float64 if dtype == np.float64 else np.float32
    weight = 0.0 if rank == 1 else 0.5 + rank
    return [wide(weight) * x.astype(wide) for x in _given(rank, dtype)]


def _over_hosts(layout: str, dtype: Any, wire: Any) -> list[np.ndarray]:
    """Sums within each host, of which the rounded ones are summed over hosts, and rounded."""
    hosts = []
    for host in dict.fromkeys(layout):
        ranks = [_weighted(rank, dtype) for rank, name in enumerate(layout) if name == host]
        hosts.append([np.asarray(sum(each)).astype(wire) for each in zip(*ranks, strict=True)])
    wide = [[x.astype(np.float32) for x in host] for host in hosts]
    return [np.asarray(sum(each)).astype(wire).astype(dtype) for each in zip(*wide, strict=True)]


@pytest.mark.quick("4")
@pytest.mark.parametrize("size", [3, 4])
def test_sums_are_those_of_numpy_with_equal_bits(ranks: Callable[..., Any], size: int) -> None:
    layouts = [layout for layout in LAYOUTS + FLAT if len(layout) == size]
    found, wide = ranks(size).run(_sums, layouts, "float64", "none"), np.dtype(np.float64)
    expected = [sum(each) for each in zip(*(_weighted(r, wide) for r in range(size)), strict=True)]
    for layout, *by_rank in zip(layouts, *found, strict=True):
        for hierarchical, new, in_place in by_rank:
            assert hierarchical == (layout in LAYOUTS), layout
            for ours, again, truth in zip(new, in_place, expected, strict=True):
                np.testing.assert_allclose(ours, truth, 1e-12, 1e-12, err_msg=layout)
                np.testing.assert_allclose(again, truth, 1e-12, 1e-12, err_msg=layout)
        _check_bits(by_rank)


def _check_bits(by_rank: Any) -> None:
    bits = [[x.tobytes() for x in (*new, *in_place)] for _, new, in_place in by_rank]
    assert all(one == other for one, other in pairwise(bits))


@pytest.mark.parametrize(
    ("dtype", "compression", "wire"),
    [
        ("float32", "bf16", BFLOAT16),
        ("float32", "fp16", np.dtype(np.float16)),
        pytest.param("bfloat16", "none", BFLOAT16, marks=pytest.mark.exhaustive),
    ],
)
def test_16_bits_between_hosts_are_summed_in_float32(
    ranks: Callable[..., Any], dtype: str, compression: str, wire: Any
) -> None:
    """Within a host nothing is rounded: bit for bit the rounded sum of the hosts' rounded sums."""
    layouts = ["aabb", "abab", "abca"]  # of two ranks a host, which can be added in one order only
    found = ranks(4).run(_sums, layouts, dtype, compression)
    for layout, *by_rank in zip(layouts, *found, strict=True):
        _check_bits(by_rank)
        truth = _over_hosts(layout, np.dtype(tf.as_dtype(dtype).as_numpy_dtype), wire)
        for sums in by_rank[0][1:]:
            assert [x.tobytes() for x in sums] == [x.tobytes() for x in truth], layout


def _in_a_group(layout: str) -> tuple[bool, float, str]:
    """As the replicas of a pipeline's partition are summed: those of ranks 1 to 3."""
    from ktrainer.distributed.mpi_gradients import MpiGradients

    with on_hosts(layout) as world:
        world.step = 3
        group = world.group([1, 2, 3] if world.rank else [0], "the copies of partition 0")
        sums = MpiGradients(group)
        hierarchical, array = sums.communicators.hosts is not None, np.full(3, float(world.rank))
        sums.reduce_in_place([array], 1.0)
        sums.close()
        world.deadline = 1.0
        said = ""
        if world.rank == 1:
            with pytest.raises(DeadlineExceeded) as caught:
                MpiGradients(group)
            said = str(caught.value)
        world.deadline = 20.0
        return hierarchical, float(array[0]), said


@pytest.mark.exhaustive
def test_a_group_of_ranks_has_hosts_of_its_own(ranks: Callable[..., Any]) -> None:
    found = ranks(4, "late").run(_in_a_group, "xaab")
    assert [each[:2] for each in found] == [(False, 0.0)] + 3 * [(True, 6.0)]
    assert "rank 1 waited 1 s at step 3" in found[1][2]


def _own_loop(layout: str) -> float:
    from tests.dataparallel.helpers import started

    with on_hosts(layout), started() as hvd:
        total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.ReduceOp["SUM"])
        return float(total[0])


@pytest.mark.exhaustive
def test_a_loop_of_ones_own_sums_over_hosts(ranks: Callable[..., Any]) -> None:
    assert ranks(3).run(_own_loop, "aab") == [6.0] * 3


def _late(layout: str) -> str:
    from ktrainer.distributed.mpi_gradients import MpiGradients

    with on_hosts(layout) as world:
        collectives = MpiGradients(world)
        world.deadline, world.step = 1.0, 7
        if world.rank == 1:
            return ""
        with pytest.raises(DeadlineExceeded) as caught:
            collectives.reduce_in_place([np.ones(3)], 1.0)
        return str(caught.value)


@pytest.mark.exhaustive
def test_a_late_rank_is_named_with_the_operation(ranks: Callable[..., Any]) -> None:
    leader, _, other = ranks(3, "late").run(_late, "aab")
    assert "rank 0 waited 1 s at step 7 in 'all-reduce of gradients within a host'" in leader
    assert "rank 1" in leader
    assert "rank 2 waited 1 s at step 7 in 'all-reduce of gradients between hosts'" in other


HEALS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from ktrainer.distributed import host_groups, open_world
from ktrainer.distributed.launcher_events import report_phase
from ktrainer.errors import PeerLost

layout, lost = sys.argv[1], int(sys.argv[2])
world = open_world(heal=True)
world.deadline = 20.0
name = layout[world.rank]
host_groups.host_name = lambda: name
import tensorflow  # which opens a Trainer
from ktrainer.distributed.mpi_gradients import MpiGradients

collectives = MpiGradients(world)

def total(value):
    array = np.full(70_000, float(value))
    collectives.reduce_in_place([array], 1.0)
    assert (array == array[0]).all()
    return array[0]

before = collectives.communicators.hosts is not None, total(world.rank)
report_phase(1, range(world.size))
summed = [Path(f"{__file__}.{rank}") for rank in range(world.size)]
summed[world.rank].touch()
if world.rank == lost:
    end = time.monotonic() + 60
    while not all(path.exists() for path in summed):  # others may be in the first sum still
        assert time.monotonic() < end, "other ranks have not ended the first sum within 60 s"
        world.answer("a file")  # so that MPI sends what it may have kept
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        total(1)
except Exception as error:
    assert world.has_lost(error), error
    world.record_interruption(error)
world.heal()
print(*before, collectives.communicators.hosts is not None, total(world.stable_rank), flush=True)
report_phase(2, [member.stable_rank for member in world.members])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "lost", "after"),
    [("aabb", 2, True), ("aabb", 3, True), ("aab", 0, False), ("aab", 2, False)],
    ids=["leader", "member", "flat after", "one host after"],
)
def test_the_groups_are_made_again_when_a_rank_is_lost(
    tmp_path: Path, layout: str, lost: int, after: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEALS)
    size = len(layout)
    words = ("--no-prefix", "--timeout", "90", str(script), layout, str(lost))
    words += ("backend=data_parallel",)  # Keras, once imported, has the configuration checked
    done = launch(tmp_path, "--heal", "-n", str(size), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = size * (size - 1) / 2
    assert done.stdout.splitlines() == [f"True {whole} {after} {whole - lost}"] * (size - 1)


# Traffic of one sum of `elements` float32, as parts of the array, that the host of rank 0 sends.
TRAFFIC = """
import json, sys, time
from pathlib import Path
import numpy as np
import tensorflow as tf
from ktrainer.distributed import open_world
from ktrainer.distributed.mpi_gradients import MpiGradients

world, found = open_world(60.0), {}
HEADERS = 14 + 20 + 32  # of Ethernet, IPv4 and TCP, also of a packet that only acknowledges

def counters():
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.split(":")[0].strip() == sys.argv[2]:
            words = line.split(":")[1].split()
            sent, received = map(int, words[8:10]), map(int, words[0:2])
            return np.array([size - HEADERS * packets for size, packets in (sent, received)])

for hierarchical, wire in [(False, "none"), (True, "none"), (True, "bf16")]:
    sums = MpiGradients(world, 25.0, wire, hierarchical=hierarchical)
    array = np.full(int(sys.argv[1]), 1.0 + world.rank, np.float32)
    in_place = lambda: sums.reduce_in_place([array], 1.0)
    new = lambda: sums.sum_bucket(np.array(1.0), np.copy(array))
    for name, run in {"new": new, "in place": in_place}.items():
        run()  # connections are made
        every = []
        for _ in range(4):  # TCP sends some packets again on a busy machine
            world.barrier()
            time.sleep(0.2)
            before = counters()
            world.barrier()
            run()
            time.sleep(0.2)
            every.append((counters() - before) / array.nbytes)
            world.barrier()
        least = np.min(every, 0)
        found[f"{'hierarchical' if hierarchical else 'flat'} {wire} {name}"] = least.tolist()
    assert (sums.communicators.hosts is not None) == hierarchical
    sums.close()
if world.rank == 0:
    print(json.dumps(found), flush=True)
"""


def _traffic(made: Hosts, tmp_path: Path, per_host: list[int], mapping: str) -> dict[str, Any]:
    script = tmp_path / "traffic.py"
    script.write_text(TRAFFIC)
    places = ",".join(f"{n}:{count}" for n, count in zip(made.names, per_host, strict=True))
    mca = {"pml": "ob1", "btl": "tcp,self,sm", "btl_tcp_if_include": INTERFACE}
    done = made.run(
        0,
        *(find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "--map-by", mapping),
        *("--host", places, "-n", sum(per_host), "--prtemca", "plm_ssh_agent", made.agent),
        *("--prtemca", "prte_if_include", INTERFACE),
        *(word for key, value in mca.items() for word in ("--mca", key, value)),
        *("--mca", "mpi_yield_when_idle", "1", "-x", f"PYTHONPATH={ROOT}"),
        *(warm_python_on(made), script, 1_000_001, INTERFACE),
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {key: max(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.exhaustive
def test_bytes_between_two_hosts(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Ranks dealt to the hosts in turn: half of a flat sum, a quarter with bf16."""
    found = _traffic(hosts(2), tmp_path, [2, 2], "node")
    for name in ("new", "in place"):
        flat = found[f"flat none {name}"]
        assert flat > 1.9
        assert found[f"hierarchical none {name}"] <= 0.52 * flat, found
        assert found[f"hierarchical bf16 {name}"] <= 0.26 * flat, found


@pytest.mark.exhaustive
def test_each_host_sends_its_sum_once(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Ranks in order of hosts: as little as any sum can, 2 (hosts - 1) / hosts of the array."""
    found = _traffic(hosts(3), tmp_path, [2, 1, 2], "slot")
    least = 4 / 3
    for name in ("new", "in place"):
        assert found[f"hierarchical none {name}"] == pytest.approx(least, rel=0.02), found
        assert found[f"hierarchical bf16 {name}"] == pytest.approx(least / 2, rel=0.02), found
        assert found[f"flat none {name}"] > 0.99 * least, found
