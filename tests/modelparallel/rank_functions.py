"""What ranks do in the tests of settings, messages and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.modelparallel.helpers import SECONDS, data, loss_of, model_of, started, weights


def numbers(placement: str) -> dict[str, Any]:
    """Ranks, sizes, groups and messages on one rank."""
    from tests.dataparallel.helpers import caught

    with started(partitions=2, placement_strategy=placement) as smp:
        again = caught(lambda: smp.init({"partitions": 2}))
        me, groups, kinds = smp.rank(), smp.CommGroup, smp.RankType
        other = 1 - smp.mp_rank()
        if smp.mp_rank() == 0:
            smp.send({"from": me}, other, kinds.MP_RANK)
            got = smp.recv_from(other, kinds.MP_RANK)
        else:
            got = smp.recv_from(other, kinds.MP_RANK)
            smp.send({"from": me}, other, kinds.MP_RANK)
        smp.barrier()
        smp.dp_barrier()
        smp.mp_barrier()
        return {
            "again": again,
            "rank": (me, smp.size()),
            "mp": (smp.mp_rank(), smp.mp_size(), smp.pp_rank(), smp.pp_size()),
            "dp": (smp.dp_rank(), smp.dp_size()),
            "local": (smp.local_rank(), smp.local_size()),
            "mp_group": smp.get_mp_group(),
            "dp_group": smp.get_dp_group(),
            "got": got["from"],
            "root": [
                _from_first(smp, group, kind, own)
                for group, kind, own in zip(
                    groups, kinds, (me, smp.mp_rank(), smp.dp_rank()), strict=True
                )
            ],
            "every": [smp.allgather(me, g) for g in groups],
            "self": caught(lambda: smp.send(1, me)),
            "group": caught(lambda: smp.barrier("all")),
            "kind": caught(lambda: smp.recv_from(0, "mp")),
        }


def _from_first(smp: Any, group: Any, kind: Any, own: int) -> int:
    """The number of the rank that is first in a group, which sends it to the others."""
    if own:
        return smp.recv_from(0, kind)["rank"]
    smp.broadcast({"rank": smp.rank()}, group)
    return smp.rank()


def waits() -> str:
    """What a rank raises that waits for a message that is not sent."""
    import ktrainer.modelparallel as smp
    from ktrainer.distributed import current_world
    from tests.dataparallel.helpers import caught

    smp.init({"partitions": 2}, deadline=SECONDS)
    current_world().deadline = 1.0
    said = caught(lambda: smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK))
    smp.shutdown()
    return said


def over_replicas(placement: str) -> tuple[Any, ...]:
    """`ktrainer.dataparallel` after `smp.init(horovod=True)`."""
    import tensorflow as tf

    import ktrainer.dataparallel as sdp
    from tests.dataparallel.helpers import caught

    with started(partitions=2, horovod=True, placement_strategy=placement) as smp:
        me = tf.constant(float(smp.rank()), tf.float64)
        root = tf.Variable(me)
        sdp.broadcast_variables([root], root_rank=0)
        return (
            smp.get_dp_group(),
            (sdp.rank(), sdp.size()),
            float(sdp.allreduce(me)),
            float(tf.function(lambda: sdp.allreduce(me, op=sdp.ReduceOp.SUM))()),
            float(root),
            caught(sdp.init),
            caught(lambda: sdp.add_process_set([0])),
        )


def train(folder: str, stop: int | None, save: int | None, partitions: int = 2) -> dict[str, Any]:
    """The loop of `helpers` with checkpoints: restores the newest one before the first step.

    Args:
        stop: steps after which it ends; None: all.
        save: the step after which it saves.
    """
    import keras
    import tensorflow as tf

    import ktrainer.modelparallel as smp

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    smp.init({"partitions": partitions, "microbatches": 2}, deadline=SECONDS)
    try:
        model, optimizer = model_of(smp.DistributedModel), keras.optimizers.Adam(0.01)
        step = tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
        manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=2)

        @smp.step
        def get_grads(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)

        @tf.function
        def train_step(x: Any, y: Any) -> None:
            gradients = [g.accumulate() for g in get_grads(x, y)]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        restored = manager.restore()
        first, paths = int(step), []
        for x, y in list(zip(*data(), strict=True))[first:stop]:
            train_step(tf.constant(x), tf.constant(y))
            step.assign_add(1)
            if save == int(step):
                paths += [manager.save() for _ in range(3)]
        return {
            "weights": weights(model),
            "restored": restored,
            "paths": paths,
            "kept": manager.checkpoints,
            "latest": manager.latest_checkpoint,
            "step": int(step),
        }
    finally:
        smp.shutdown()


def set_after_restoring(folder: str) -> dict[str, Any]:
    """A step and a checkpoint; then a loop that restores it, and sets the rate and the step; then
    one with a larger last layer, which it does not fit."""
    from tests.dataparallel.helpers import caught

    with _small_loop(folder, 1) as (run, manager, _, _):
        run()
        manager.save()
    with _small_loop(folder, 1) as (run, manager, optimizer, step):
        manager.restore()
        restored = float(optimizer.learning_rate), int(optimizer.iterations), int(step)
        optimizer.learning_rate = 0.5
        step.assign_add(1)
        run()
        after = float(optimizer.learning_rate), int(optimizer.iterations), int(step)
    with _small_loop(folder, 2) as (run, manager, optimizer, step):
        model = run()
        before = weights(model)
        said = caught(manager.restore)
        same = all((value == before[name]).all() for name, value in weights(model).items())
    return {"restored": restored, "after": after, "said": said, "same": same}


@contextmanager
def _small_loop(folder: str, units: int) -> Iterator[tuple[Any, ...]]:
    """A function that makes a step and returns the model; its checkpoints, optimizer and step."""
    import keras
    import tensorflow as tf

    with started(partitions=2, microbatches=2) as smp:
        keras.utils.clear_session()

        class Net(smp.DistributedModel):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(name="net")
                self.first = keras.layers.Dense(4, name="first")
                self.second = keras.layers.Dense(units, name="second")

            def call(self, x: Any) -> Any:
                return self.second(self.first(x))

        model, optimizer = Net(), keras.optimizers.Adam(0.01, name="adam")
        step = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)

        @smp.step
        def gradients(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)

        def run() -> Any:
            x, y = (tf.constant(each[0]) for each in data())
            found = [g.accumulate() for g in gradients(x, y)]
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
            step.assign_add(1)
            return model

        yield run, smp.CheckpointManager(checkpoint, folder), optimizer, step


def numbered(folder: str, numbers: list[int | None]) -> dict[str, Any]:
    """Checkpoints of a counter, which is their place, saved under the given numbers."""
    import tensorflow as tf

    with started(partitions=1) as smp:
        step = tf.Variable(0)
        manager = smp.CheckpointManager(tf.train.Checkpoint(step=step), folder, max_to_keep=2)
        paths = []
        for place, number in enumerate(numbers):
            step.assign(place)
            paths.append(manager.save(number))
        step.assign(-1)
        latest = manager.restore()
        return {
            "saved": paths,
            "kept": manager.checkpoints,
            "latest": latest,
            "step": int(step),
        }


def with_other_clocks(folder: str) -> dict[str, Any]:
    """Checkpoints of hosts of which each later one's clock is a minute behind, then one while the
    newest cannot be read."""
    import time
    from unittest import mock

    import tensorflow as tf

    from ktrainer.modelparallel import checkpoint_manager

    def fails(path: Path) -> Any:
        if path.name == "ckpt-4":
            raise OSError("stale file handle")
        return read(path)

    read = checkpoint_manager.read_state
    with started(partitions=1) as smp:
        manager = smp.CheckpointManager(
            tf.train.Checkpoint(step=tf.Variable(0)), folder, max_to_keep=2
        )
        for place in range(4):
            with mock.patch.object(time, "time", lambda place=place: 1e9 - 60 * place):
                manager.save()
        kept = manager.checkpoints
        with mock.patch.object(checkpoint_manager, "read_state", fails):
            manager.save()
            manager.save()
        return {"kept": kept, "all": manager.checkpoints}


def killed(folder: str) -> dict[str, Any]:
    """Checkpoint 0 is saved again, and the process ends between the two renames; what later ones
    find, save and remove. One has another dtype."""
    from unittest import mock

    import tensorflow as tf

    from ktrainer.checkpoint.format import checkpoint_folder
    from tests.dataparallel.helpers import caught

    def kill(point: str, path: Path) -> None:
        if point == "between renames":
            raise KeyboardInterrupt

    with started(partitions=1) as smp:

        def manager_of(value: Any) -> tuple[Any, Any]:
            step = tf.Variable(value)
            checkpoint = tf.train.Checkpoint(step=step)
            return step, smp.CheckpointManager(checkpoint, folder, max_to_keep=1)

        step, manager = manager_of(7)
        manager.save(0)
        kills = mock.patch.object(checkpoint_folder, "fault_point", kill)
        with kills, suppress(KeyboardInterrupt):
            manager.save(0)
        step, manager = manager_of(0)
        latest, restored = manager.latest_checkpoint, manager.restore()
        (Path(folder) / ".ckpt-0.gone" / "files").mkdir(parents=True)
        return {
            "found": (latest, restored, int(step)),
            "dtype": caught(manager_of(0.0)[1].restore),
            "kept": [manager.save(), *manager.checkpoints],
            "files": sorted(path.name for path in Path(folder).iterdir()),
        }


def saved(folder: str) -> list[str]:
    """A trained model written whole, and what goes wrong where it cannot be."""
    import tensorflow as tf

    from tests.dataparallel.helpers import caught

    with started(partitions=2, microbatches=2) as smp:
        model = model_of(smp.DistributedModel)
        early = caught(lambda: model.save_model(f"{folder}/early.keras"))

        @smp.step
        def evaluate(x: Any) -> Any:
            return model(x, training=False)

        predicted = evaluate(tf.constant(data()[0][0])).merge()
        model.save_model(f"{folder}/whole.keras")
        model.save_model(f"{folder}/whole.weights.h5")
        if smp.rank() == 0:
            np.save(Path(folder) / "predicted.npy", predicted.numpy())
        return [early, caught(lambda: model.save_model(f"{folder}/whole"))]


def plain(folder: str) -> list[float]:
    """How far plain Keras' predictions from the written files are from those of the stages."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    want, (x, _) = np.load(Path(folder) / "predicted.npy"), data()
    loaded = keras.models.load_model(f"{folder}/whole.keras")
    whole = model_of(keras.Model)
    whole(x[0])
    whole.load_weights(f"{folder}/whole.weights.h5")
    return [float(np.abs(np.asarray(m(x[0])) - want).max()) for m in (loaded, whole)]
