"""A loop under `elastic.run` in which ranks are lost and join; `test_elastic.py` launches it.

    ktrainer run --heal -n 3 elastic_script.py RESULT FAULT ...

FAULT is `STABLE_RANK:STEP:WHERE`: who is killed in which step, `eager`, `traced` (in a compiled
function, with an all-reduce under way) or `commit`. Each step has the same global batch, whatever
the number of ranks, so that all end with the weights of one process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ktrainer.dataparallel as hvd
from ktrainer.dataparallel.state import opened

STEPS, ROWS, EVERY = 24, 12, 3


class Loop:
    """Model, optimizer and compiled step, the whole state, and what the ranks see."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(hvd.rank())  # the ranks begin with different weights
        layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh", dtype="float64")]
        self.model = keras.Sequential(layers)
        self.optimizer = keras.optimizers.Adam(0.05)
        self.optimizer.build(self.model.trainable_variables)
        self.state = hvd.elastic.TensorFlowKerasState(
            self.model, self.optimizer, step=0, losses=[], sizes=[]
        )
        self.resets: list[int] = []
        self.state.register_reset_callbacks([lambda: self.resets.append(hvd.size())])
        self.traces = 0

    # Traced once: the number of rows changes with that of ranks.
    @tf.function(
        input_signature=[tf.TensorSpec([None, n], tf.float64) for n in (4, 3)],
    )
    def step(self, x: tf.Tensor, y: tf.Tensor) -> Any:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
        tape = hvd.DistributedGradientTape(tape)
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        rows = tf.range(hvd.size_op() * 2) * 10 + hvd.rank_op()
        others = {
            "allgather": hvd.allgather(tf.fill([hvd.rank_op() + 1], hvd.rank_op())),
            "reducescatter": hvd.reducescatter(tf.cast(tf.range(7), tf.float64), op=hvd.Sum),
            "alltoall": hvd.alltoall(rows),
            "average": hvd.allreduce(tf.cast([5, 7], tf.int64) * tf.cast(hvd.rank_op(), tf.int64)),
        }
        return hvd.oob_allreduce(loss), others

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's part of a global batch."""
        random = np.random.default_rng(step)
        x = random.normal(size=(ROWS, 4))
        mine = slice(hvd.rank(), None, hvd.size())
        return x[mine], np.sin(x[mine, :3])


def check(found: dict[str, Any], rank: int, size: int) -> None:
    """Compare collectives in a compiled function with NumPy, for the ranks that there are."""
    every = np.concatenate([[k] * (k + 1) for k in range(size)])
    np.testing.assert_array_equal(found["allgather"], every)
    parts = np.array_split(np.arange(7.0) * size, size)
    np.testing.assert_allclose(found["reducescatter"], parts[rank], rtol=1e-12)
    sent = [[(2 * rank) * 10 + k, (2 * rank + 1) * 10 + k] for k in range(size)]
    np.testing.assert_array_equal(found["alltoall"], np.ravel(sent))
    mean = np.array([5, 7]) * sum(range(size)) // size
    np.testing.assert_array_equal(found["average"], mean)


def train(loop: Loop, at: Callable[[str, int], None] = lambda where, step: None) -> None:
    state = loop.state
    while state.step < STEPS:
        wait_for_a_rank(state)
        at("traced", state.step)
        loss, others = loop.step(*map(tf.constant, loop.batch(state.step)))
        check({k: v.numpy() for k, v in others.items()}, hvd.rank(), hvd.size())
        at("eager", state.step)
        assert float(hvd.allreduce(tf.constant(2.0), op=hvd.Sum)) == 2 * hvd.size()
        state.step += 1
        state.losses.append(float(loss))
        state.sizes.append(hvd.size())
        if state.step % EVERY == 0:
            at("commit", state.step)
            state.commit()


def kills(faults: list[str]) -> Callable[[str, int], None]:
    """What kills this process, at the places that the faults name."""
    stable_rank = opened().world.stable_rank
    mine = [each.split(":") for each in faults if each.startswith(f"{stable_rank}:")]

    def at(where: str, step: int) -> None:
        for _, when, place in mine:
            if place == where and step == int(when):
                if where == "traced":
                    in_a_reduction()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    return at


def wait_for_a_rank(state: Any) -> None:
    """Where ranks are replaced, return once one is there, or raise that it joins."""
    while os.environ.get("JOINS_AT") == str(state.step) and hvd.size() == 1:
        time.sleep(0.1)
        state.check_host_updates()


def in_a_reduction() -> None:
    """Let this process be killed when it has started to reduce gradients."""
    from ktrainer.distributed.elastic_world import ElasticWorld

    original = ElasticWorld.wait

    def wait(self: Any, request: Any, what: str, *buffers: Any) -> None:
        if "gradients" in what:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, request, what, *buffers)

    ElasticWorld.wait = wait  # type: ignore[method-assign]


def result(loop: Loop) -> dict[str, Any]:
    state = loop.state
    return {
        "values": [v.numpy().ravel().tolist() for v in state.variables],
        "losses": state.losses,
        "sizes": state.sizes,
        "resets": loop.resets,
        "traces": loop.traces,
        "size": hvd.size(),
    }


def main() -> None:
    path, *faults = sys.argv[1:]
    hvd.init(deadline=60)
    loop, at = Loop(), kills(faults)
    hvd.elastic.run(lambda state: train(loop, at))(loop.state)
    found = hvd.allgather_object(result(loop))
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
