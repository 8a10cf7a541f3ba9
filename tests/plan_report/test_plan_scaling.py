"""`ktrainer plan --world`: its table, and what it refuses."""

from __future__ import annotations

import re

import pytest

from ktrainer.cli import main
from ktrainer.cli.plan_scaling import _measuring, parse_bandwidth, parse_latency, parse_worlds
from ktrainer.plan_report.network_measurement import first_on_one_host
from ktrainer.plan_report.planning_mode import ScalingRequest
from ktrainer.runtime.hardware import Hardware
from tests.plan_report.scripts import PIPELINE, SCRIPT
from tests.processes import ktrainer

TIMES = ("compute", "stragglers", "communication", "bubble", "input")
COLUMNS = ("world", "hosts", "batch", *TIMES, "step", "examples/s", "speed-up", "efficiency")
NETWORK = ["--per-host=1", "--threads=1", "--latency=100ms", "--bandwidth=1MB"]


def rows(out: str) -> list[dict[str, float]]:
    """The table, by the names of its columns."""
    found = [
        line.rstrip("%").split() for line in out.splitlines() if re.match(r" +\d+ +\d+ ", line)
    ]
    return [dict(zip(COLUMNS, map(float, row), strict=True)) for row in found]


@pytest.mark.slow
def test_data_parallel_steps(script):
    done = ktrainer("plan", "--world", "4", script, *NETWORK, "backend=data_parallel")
    assert done.returncode == 0, done.stderr
    assert "(strong scaling)" in done.stdout
    assert "network   1e+05 us, 1.0 MB/s, as given" in done.stdout
    assert "trained" not in done.stdout
    table = rows(done.stdout)
    assert [(row["world"], row["hosts"], row["batch"]) for row in table] == [
        (1, 1, 32),
        (2, 2, 16),
        (4, 4, 8),
    ]
    for row in table:
        assert sum(row[name] for name in TIMES) == pytest.approx(row["step"], abs=0.03)
        assert row["examples/s"] == pytest.approx(32e3 / row["step"], rel=0.05)
    assert table[0]["communication"] == 0
    for row, rounds in zip(table[1:], (1, 2), strict=True):
        ranks, nbytes = row["world"], 4 * 2176  # of float32, in one piece
        reduced = 2 * 100 + 2 * (ranks - 1) / ranks * nbytes / 1000
        vote = 2 * rounds * (100 + 16 / 1000)
        # The rest are copies, of microseconds.
        assert row["communication"] == pytest.approx(reduced + vote, rel=2e-3)


@pytest.mark.slow
def test_steps_with_powersgd(script):
    words = ["backend=data_parallel", "backend.compression=powersgd", "backend.powersgd_rank=1"]
    done = ktrainer("plan", "--world", "2", script, *NETWORK, *words)
    assert done.returncode == 0, done.stderr
    _, two = rows(done.stdout)
    # The left factors of 8 matrices, their biases, and the right factors: 8 * 16 numbers each.
    reduced = 3 * (2 * 100 + 4 * 8 * 16 / 1000)
    alone = reduced + 2 * (100 + 16 / 1000)
    # A message may be under way while another matrix is multiplied.
    assert max(alone - two["compute"], 0.95 * alone) <= two["communication"] <= alone * 1.002


@pytest.mark.slow
def test_steps_of_a_replicated_pipeline(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = [*PIPELINE, "data.batch=per_worker"]
    done = ktrainer("plan", path, *words, "--world=2,4", "--per-host=2", *NETWORK[1:])
    assert done.returncode == 0, done.stderr
    assert "(weak scaling)" in done.stdout
    assert "2 partitions x 2 replicas (cluster)" in done.stdout
    two, four = rows(done.stdout)
    assert (two["world"], two["batch"], two["hosts"]) == (2, 32, 1)
    assert (four["world"], four["batch"], four["hosts"]) == (4, 32, 2)
    assert two["bubble"] > 0
    # Each partition has half of the gradients, and both share the link: all of them at once.
    reduced = 2 * 2 * 100 / 2 + 4 * 2176 / 1000
    assert four["communication"] == pytest.approx(reduced + 2 * (100 + 16 / 1000), rel=0.02)
    assert two["communication"] < 10


@pytest.mark.parametrize(
    "words, says",
    [
        (["--world", "0"], "for 1 to 1024 processes, not for 0"),
        (["--world", "2000"], "for 1 to 1024 processes, not for 2000"),
        (["--world", "four"], "'four' is no number of processes: write --world 64"),
        (["--world", "1,,2"], "is no number of processes"),
        (["--world", "4", "--per-host", "0"], "--per-host: '0' is no whole number from 1"),
        (["--world", "64", "--per-host", "2"], "32 hosts, and the network .* is not known"),
        # The script may name the pipeline
        (["--world", "64", "--per-host=2", "backend.microbatches=8"], "32 hosts, and the network"),
        (["--world", "64", "--latency", "50us"], "describe the network together: give both"),
        (["--world", "2", "--latency", "50"], "'50' is no time: .* such as 50us"),
        (["--world", "2", "--bandwidth", "10Gbt"], "'10Gbt' is no rate: .* such as 10Gbit"),
        (["--world", "2", "-n", "2"], "leave out -n, --picture and --trace"),
        (["--cores", "2"], "--cores is for predicted step times: add --world"),
        (["--world", "2", "backend=local", "--per-host=2"], "local is one process"),
        (["--world", "3", "--per-host=3", *PIPELINE], "3 processes are no multiple of 2"),
        (["--world", "2", "--per-host=2", "--hosts", "a:0"], "no host with a number"),
        (["--world", "4", "--per-host=2", "--hosts", "a,b"], "their link is not known.* as a:2"),
    ],
)
def test_what_it_refuses(script, words, says, capsys):
    assert main.main(["plan", script, *words]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_configuration_has_no_steps(config, capsys):
    assert main.main(["plan", config, "--world", "2"]) == 2
    assert "which takes a script (.py)" in capsys.readouterr().err


def test_as_many_processes_measure_as_it_takes():
    def measuring(world, per_host, cores, here=None):
        request = ScalingRequest((1, world), per_host, cores, 1, "report")
        return _measuring(request, here or Hardware(cores=2))

    assert [measuring(world, 2, 2) for world in (1, 2, 8)] == [1, 2, 2]
    assert [measuring(world, 8, 2) for world in (1, 3, 8)] == [1, 3, 4]  # on shared cores
    assert measuring(64, 64, 64) == 2  # which have cores of their own, as here
    assert measuring(8, 8, 1, Hardware(cores=64)) == 2
    assert measuring(8, 4, 2, Hardware(cores=2, gpus=1)) == 2


def test_the_link_within_a_host_is_that_of_two_ranks_of_one():
    assert first_on_one_host(["a", "b", "a", "a"]) == [0, 2]
    assert first_on_one_host(["a", "b", "c", "b", "c"]) == [1, 3]
    assert first_on_one_host(["a", "b"]) == []


def test_units():
    assert parse_worlds("8") == (8,)
    assert parse_worlds("4, 1,2,2") == (1, 2, 4)
    assert parse_latency("50us") == pytest.approx(50e-6)
    assert parse_latency("1.5 ms") == pytest.approx(1.5e-3)
    assert parse_bandwidth("10Gbit") == pytest.approx(1.25e9)
    assert parse_bandwidth("1.25GB") == pytest.approx(1.25e9)
    assert parse_bandwidth("800kbit/s") == pytest.approx(1e5)
