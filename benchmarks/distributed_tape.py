"""What a step with a DistributedGradientTape costs: ours, and Horovod's own, on the same script.

    ktrainer run -n 2 benchmarks/distributed_tape.py

The loop is one function that gets the library: no tape of either (no communication),
`ktrainer.dataparallel`, or `horovod.tensorflow`. `trainer.run` is the same step without a tape of
either library, run by a Trainer with that engine, whose optimizer sums. The model, the batches and
the way of measuring are those of data_parallel_step.py: 2.9 million parameters, 64 examples a
process, one thread each; the variants take turns, and ratios are those to the loop without
communication. Horovod's tape knows no Keras 3 variables, so the loops with a tape differentiate by
the TensorFlow variables inside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ktrainer.dataparallel as sdp  # before TensorFlow, to keep its log quiet
from ktrainer import Trainer

# isort: split
import keras
import tensorflow as tf
from data_parallel_step import BATCH, MODELS, read, show
from data_parallel_table import NONE, arguments, in_turns, sizes
from results import OURS, record


def loop_of(library: Any) -> Callable[[Any], tf.Tensor]:
    """The step of a script that was written for `library`; None: for one process."""
    model = MODELS["mlp"].model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        if library is not None:
            tape = library.DistributedGradientTape(tape)
        variables = [v.value for v in model.trainable_variables]
        model.optimizer.apply(tape.gradient(value, variables), model.trainable_variables)
        return value

    return lambda batch: step(*batch)


def run_by_trainer(trainer: Trainer) -> Callable[[Any], tf.Tensor]:
    """The step as `trainer.run` takes it: a loss divided by the size of the global batch."""
    model = MODELS["mlp"].model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.optimizer.build(model.trainable_variables)
    rows = BATCH * trainer.world.size

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / rows
        gradients = tape.gradient(value, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return value

    return lambda batch: trainer.run(step, *batch)


def main() -> None:
    args = arguments(__doc__).parse_args()
    import horovod.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    sdp.init()
    hvd.init()
    loops = {"none": loop_of(None), "ktrainer": loop_of(sdp), "horovod": loop_of(hvd)}
    trainers = []
    for engine in ("mpi", "horovod"):
        words = ["backend=data_parallel", f"backend.engine={engine}", "logging.progress=none"]
        trainers.append(Trainer(overrides=words))
        loops[f"trainer.run, {engine}"] = run_by_trainer(trainers[-1])
    data = MODELS["mlp"].batches(sdp.rank(), args.steps)
    times = in_turns(loops, data, sdp.barrier, args.rounds, read)
    if sdp.rank() == 0:
        print(f"{sdp.size()} processes, batch {BATCH} each")
        show(times)
        for what, ours in (
            ("step with DistributedGradientTape", "ktrainer"),
            ("the same step by trainer.run", "trainer.run, mpi"),
        ):
            values = {OURS: times[ours], "Horovod's tape": times["horovod"], NONE: times["none"]}
            record(args.results, what, sizes(sdp.size()), values, bound=NONE)
    for trainer in trainers:
        trainer.close()
    sdp.shutdown()


if __name__ == "__main__":
    main()
