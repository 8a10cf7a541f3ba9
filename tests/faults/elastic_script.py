"""A loop under `elastic.run` in which ranks are lost and join; `test_elastic.py` launches it.

    ktrainer run --heal -n 3 elastic_script.py loop|fit RESULT FAULT ...

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
from tests.dataparallel.helpers import caught

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
        self.own = tf.Variable(1.0, dtype=tf.float64)
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
        with tf.GradientTape(persistent=True) as tape:
            sent = hvd.broadcast(self.own, 0)
            loss_of_own = 6 * self.own
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(self.own)
        size = tf.cast(hvd.size_op(), tf.float64)
        rows = tf.range(hvd.size_op() * 2) * 10 + hvd.rank_op()
        others = {
            "allgather": hvd.allgather(tf.fill([hvd.rank_op() + 1], hvd.rank_op())),
            "reducescatter": hvd.reducescatter(tf.cast(tf.range(7), tf.float64), op=hvd.Sum),
            "alltoall": hvd.alltoall(rows),
            "local gradient": tape.gradient(loss_of_own, self.own),
            "gradient of broadcast": tape.gradient(sent, self.own) * size,
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
    assert found["local gradient"] == 6 / size
    assert found["gradient of broadcast"] == (size if rank == 0 else 0)
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


def kills(faults: list[str], folder: Path) -> Callable[[str, int], None]:
    """What kills this process, at the places that the faults name; before a commit, once all ranks
    have come to it, which they tell one another in `folder`."""
    stable_rank = opened().world.stable_rank
    mine = [each.split(":") for each in faults if each.startswith(f"{stable_rank}:")]

    def at(where: str, step: int) -> None:
        if where == "commit":
            (folder / f"summed-{step}-{stable_rank}").touch()
        for _, when, place in mine:
            if place == where and step == int(when):
                if where == "traced":
                    in_a_reduction()
                    return
                end = time.monotonic() + 30
                while where == "commit" and len([*folder.glob(f"summed-{step}-*")]) < hvd.size():
                    assert time.monotonic() < end, "the others have not come to this commit"
                    time.sleep(0.01)
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


def refused(loop: Loop) -> dict[str, Any]:
    """What ranks that may change cannot do; and what a process sees that is to join them."""
    calls: dict[str, Callable[[], Any]] = {
        "early": lambda: hvd.allreduce(1.0),
        "traced size": tf.function(lambda: tf.constant(hvd.size())),
        "join": hvd.join,
        "process set": lambda: hvd.add_process_set([0]),
    }
    found: dict[str, Any] = {name: caught(call) for name, call in calls.items()}
    return found | {"numbers": [hvd.rank(), hvd.size()]}


def own_error(loop: Loop) -> Callable[[str, int], None]:
    """Raises, once, what the script itself may raise to return to the last commit."""
    raised: list[int] = []

    def at(where: str, step: int) -> None:
        if where == "eager" and step == 22 and not raised:
            raised.append(step)
            raise hvd.elastic.HorovodInternalError("of the script")

    return at


EPOCHS = 4


class Fit:
    """`model.fit` with two passes an update, and the callbacks in an unfortunate order."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(n, "tanh", dtype="float64") for n in (3, 1)]
        self.model = keras.Sequential([keras.Input((4,)), *layers])
        optimizer = keras.optimizers.Adam(0.05)
        self.model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2), "mse")
        optimizer.build(self.model.trainable_variables)
        self.state = hvd.elastic.KerasState(self.model, batch=0, epoch=0)
        random = np.random.default_rng(0)
        self.x = random.normal(size=(ROWS * 6, 4))
        self.y = np.sin(self.x[:, :1])

    def train(self, at: Callable[[str, int], None]) -> None:
        x, y = (a[hvd.rank() :: hvd.size()] for a in (self.x, self.y))
        ends = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: at("batch", 6 * self.state.epoch + batch)
        )
        callbacks = [
            hvd.elastic.CommitStateCallback(self.state, batches_per_commit=100),
            hvd.elastic.UpdateEpochStateCallback(self.state),
            hvd.elastic.UpdateBatchStateCallback(self.state),
            ends,
        ]
        self.model.fit(
            *(x, y, ROWS // hvd.size()),
            epochs=EPOCHS - self.state.epoch,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )

    def result(self) -> dict[str, Any]:
        values = [v.numpy().ravel().tolist() for v in self.state.variables]
        return {"values": values, "losses": [self.state.epoch, self.state.batch]}


def main() -> None:
    kind, path, *faults = sys.argv[1:]
    hvd.init(deadline=60)
    at = kills(faults, Path(path).parent)
    if kind == "fit":
        fit = Fit()
        hvd.elastic.run(lambda state: fit.train(at))(fit.state)
        found = [fit.result()]
    else:
        loop = Loop()
        said, error_at = refused(loop), own_error(loop)
        hvd.elastic.run(lambda state: train(loop, lambda *w: (at(*w), error_at(*w))))(loop.state)
        found = hvd.allgather_object(result(loop) | {"refused": said})
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
