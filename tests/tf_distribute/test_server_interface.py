"""TensorFlow's server on the loopback interface alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktrainer.backends.tf_distribute.server_interface import all_on_loopback
from ktrainer.config.cluster_environment import ClusterSpec
from tests.distributed.test_cluster_world import free_ports
from tests.processes import script

# The server answers at 127.0.0.1 before and after; at another address of this host before only.
SCRIPT = """
import errno, json, socket, sys, time
import tensorflow as tf
from ktrainer.backends.tf_distribute import server_interface
from ktrainer.backends.tf_distribute.server_interface import kept_on_interface, narrow_port
from ktrainer.config.cluster_environment import ClusterSpec

def answers(host):
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False

def moved():
    until = time.monotonic() + 10
    while True:
        try:
            return narrow_port(port)
        except OSError as error:  # a connection of `answers` that TensorFlow has yet to accept
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)

port = int(sys.argv[1])
server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]}, "worker", 0, "grpc")
found = [[answers("127.0.0.2"), answers("127.0.0.1")]]
is_moved = [moved(), moved()]
found.append([answers("127.0.0.2"), answers("127.0.0.1")])
tf.config.experimental_connect_to_host(server.target)
with tf.device("/job:worker/task:0/device:CPU:0"):
    product = float(tf.reduce_sum(tf.matmul(tf.ones([3, 4]), tf.ones([4, 3]))))
server_interface._AFTER = 60.0
began = time.monotonic()
with kept_on_interface(ClusterSpec({"worker": (f"127.0.0.1:{port}",)}, "worker", 0)):
    pass  # as in a later Trainer, whose server runs
print(json.dumps([found, is_moved, product, time.monotonic() - began]))
"""


@pytest.mark.exhaustive
def test_a_server_is_moved_and_serves(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = script(tmp_path / "script.py", port)
    assert done.returncode == 0, done.stderr
    found, moved, product, seconds = json.loads(done.stdout)
    assert found == [[True, True], [False, True]]
    assert moved == [True, False]  # the second time there is nothing to move
    assert product == 36
    assert seconds < 30  # not the time in which a server may still be starting


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [
        (("127.0.0.1:1", "127.0.0.1:2"), True),
        (("localhost:1", "127.0.0.1:2"), True),
        (("127.0.0.1:1", "host:2"), False),
        (("[::1]:1", "[::1]:2"), False),
    ],
)
def test_clusters_of_one_host(addresses: tuple[str, ...], alone: bool) -> None:
    assert all_on_loopback(ClusterSpec({"worker": addresses}, "worker", 0)) is alone
