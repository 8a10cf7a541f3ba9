"""Clusters as TF_CONFIG and Slurm name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktrainer.config.cluster_environment import expand_hosts, slurm_cluster, tf_config
from ktrainer.config.launch_environment import (
    LOOPBACK,
    NETWORK,
    listening_address,
    mpi_on_interface,
    ports_on_interface,
)
from ktrainer.errors import ConfigError, SetupError

TWO = {"worker": ["one:1000", "two:1000"]}


def environ(cluster: Any, kind: str = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_workers() -> None:
    found = tf_config(environ(TWO, index=1))
    assert found is not None
    assert (found.workers, found.number, found.address) == (["one:1000", "two:1000"], 1, "two:1000")
    assert not found.has_servers
    assert tf_config({"TF_CONFIG": found.as_json()}) == found


def test_the_chief_is_the_first_worker() -> None:
    found = tf_config(environ({"chief": ["zero:1"], **TWO}, index="1"))
    assert found is not None
    assert found.workers == ["zero:1", "one:1000", "two:1000"]
    assert found.number == 2


@pytest.mark.parametrize(
    "text", ["", "{}", json.dumps({"cluster": {"worker": ["one:1"]}, "task": {"type": "worker"}})]
)
def test_no_cluster(text: str) -> None:
    assert tf_config({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no object"),
        (environ({"wrker": ["one:1", "two:2"]})["TF_CONFIG"], "no job 'wrker'"),
        (environ({"worker": ["one", "two:2"]})["TF_CONFIG"], "host:port"),
        (environ(TWO, "ps")["TF_CONFIG"], "task.type is 'ps'"),
        (environ(TWO, index=2)["TF_CONFIG"], "task.index is 2"),
    ],
)
def test_malformed(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        tf_config({"TF_CONFIG": text})
    assert caught.value.path == "TF_CONFIG"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b7", ["a", "b7"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("n[8-10]-ib", ["n8-ib", "n9-ib", "n10-ib"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_slurm() -> None:
    variables = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "1",
    }
    found = slurm_cluster(variables)
    assert found is not None
    assert found.workers == ["n1:8888", "n1:8889", "n2:8888"]
    assert found.number == 1
    assert slurm_cluster({**variables, "SLURM_STEP_NUM_TASKS": "1"}) is None
    moved = slurm_cluster({**variables, "KTRAINER_PORT": "5000"})
    assert moved is not None
    assert moved.workers[1] == "n1:5001"


@pytest.mark.parametrize("network", ["eth1", "10.1.2.3/24", "10.1.2.300"])
def test_a_network_that_is_none_is_refused(network: str) -> None:
    with pytest.raises(SetupError, match=r"is no network: .*; write it as 10\.1\.2\.0/24"):
        listening_address({NETWORK: network})


def test_a_launch_within_one_host_stays_on_loopback_whatever_the_network() -> None:
    environ = {NETWORK: "10.1.2.0/24", **mpi_on_interface()}
    assert listening_address(environ) == LOOPBACK
    assert ports_on_interface(environ)
    assert not ports_on_interface({NETWORK: "10.1.2.0/24"})
    assert ports_on_interface(mpi_on_interface("10.1.2.0/24"))
