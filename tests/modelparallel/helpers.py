"""A small model and its loop, in stages and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

SECONDS = 20.0
ROWS, STEPS = 12, 3


@contextmanager
def started(**config: Any) -> Iterator[Any]:
    """`ktrainer.modelparallel`, initialised in the block, with float64."""
    import keras

    import ktrainer.modelparallel as smp

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    smp.init(config)
    try:
        yield smp
    finally:
        smp.shutdown()


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all steps."""
    random = np.random.default_rng(3)
    x = random.normal(size=(STEPS, ROWS, 5))
    return x, np.tanh(x.sum(-1, keepdims=True))


def layers(drop: float = 0.2) -> list[Any]:
    """Layers with seeds of their own, with statistics and dropout."""
    import keras

    def dense(units: int, seed: int, **more: Any) -> Any:
        made = keras.initializers.GlorotUniform(seed=seed)
        return keras.layers.Dense(units, kernel_initializer=made, name=f"dense_{seed}", **more)

    return [
        dense(8, 1, activation="tanh"),
        keras.layers.BatchNormalization(name="norm"),
        dense(7, 2, activation="tanh"),
        keras.layers.Dropout(drop, seed=5, name="dropout"),
        dense(6, 3, activation="tanh"),
        dense(1, 4),
    ]


def model_of(base: type, partition: Callable[[int], Any] | None = None, drop: float = 0.2) -> Any:
    """A subclass of `base` made of `layers()`; with `partition` one layer after the other is put
    on stages 0 and 1."""

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.parts = []
            for k, layer in enumerate(layers(drop)):
                self.parts.append(layer)
                setattr(self, f"part_{k}", layer)

        def call(self, x: Any, training: bool = False) -> Any:
            for k, layer in enumerate(self.parts):
                if partition is None:
                    x = layer(x, training=training) if k in (1, 3) else layer(x)
                    continue
                with partition(int(k > 1)):
                    x = layer(x, training=training) if k in (1, 3) else layer(x)
            return x

    return Net()


def undeclared(base: type) -> Any:
    """A subclass of `base` made of `layers()`, whose `call` leaves `training` to Keras."""

    class Undeclared(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.parts = layers()

        def call(self, x: Any) -> Any:
            for layer in self.parts:
                x = layer(x)
            return x

    return Undeclared()


def training_by_default(base: type) -> Any:
    """The same, which trains where a call does not say otherwise."""

    class Default(type(undeclared(base))):  # type: ignore[misc]
        def call(self, x: Any, training: bool = True) -> Any:
            return super().call(x)

    return Default()


def in_training() -> list[tuple[np.ndarray, np.ndarray, dict[str, Any], dict[str, Any]]]:
    """Outputs in stages on this rank and in one process, and the variables afterwards: of a `call`
    without `training`, that is given it, and of one that has it by default."""
    import keras
    import tensorflow as tf

    found = []
    x = tf.constant(data()[0][0])
    with started(partitions=2, microbatches=1) as smp:
        for build, given in ((undeclared, {"training": True}), (training_by_default, {})):
            model, whole = build(smp.DistributedModel), build(keras.Model)
            predicted = smp.step(lambda x, m=model, g=given: m(x, **g))(x).concat()
            want = whole(x, **given)
            found.append((predicted.numpy(), want.numpy(), weights(model), weights(whole)))
    return found


def tied_without_a_seed() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The weights on this rank of a model whose last layer is its first one's kernel, and its
    outputs, where each rank draws other values."""
    import keras
    import tensorflow as tf

    with started(partitions=2, microbatches=2) as smp:
        keras.utils.set_random_seed(smp.rank())

        class Tied(smp.DistributedModel):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(name="tied")
                self.first = keras.layers.Dense(4, use_bias=False, name="first")
                self.inner = [keras.layers.Dense(4, name=f"inner_{k}") for k in range(3)]

            def call(self, x: Any) -> Any:
                x = self.first(x)
                for layer in self.inner:
                    x = layer(x)
                return keras.ops.matmul(x, keras.ops.transpose(self.first.kernel))

        model, x = Tied(), tf.constant(data()[0][0])
        predicted = smp.step(lambda x: model(x))(x).concat().numpy()
        return weights(model), predicted


def loss_of(y: Any, predicted: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tf.square(y - predicted))


def single(
    microbatches: int, clip: float | None = None, drop: float = 0.2
) -> dict[str, np.ndarray]:
    """Weights after the loop in one process, whose gradients are means over microbatches."""
    import keras
    import tensorflow as tf

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    model, optimizer = model_of(keras.Model, None, drop), keras.optimizers.Adam(0.01)
    losses = []
    for x, y in zip(*data(), strict=True):
        found = []
        for mx, my in zip(np.split(x, microbatches), np.split(y, microbatches), strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of(my, model(mx, training=True))
            found.append(tape.gradient(loss, model.trainable_variables))
            losses.append(float(loss))
        mean = [tf.add_n(each) / microbatches for each in zip(*found, strict=True)]
        if clip is not None:
            mean, _ = tf.clip_by_global_norm(mean, clip)
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    evaluated = float(loss_of(data()[1][0], model(data()[0][0])))
    return {**weights(model), "losses": np.array(losses), "evaluated": np.array(evaluated)}


def weights(model: Any) -> dict[str, np.ndarray]:
    """The values of the variables that this process has, by path."""
    from ktrainer.steps.remote_variable import is_remote

    every = [v for layer in model.layers for v in layer.variables if is_remote(v) is None]
    return {v.path: np.asarray(v.numpy()) for v in every if "seed" not in v.path}


def in_stages(
    traced: bool = False,
    own_tape: bool = True,
    by_hand: bool = False,
    clip: float | None = None,
    replicas: int = 1,
    **config: Any,
) -> dict[str, Any]:
    """The same loop through stages, on one rank; its weights, losses and threads left."""
    import threading

    import keras
    import tensorflow as tf

    with started(**config) as smp:
        model = model_of(smp.DistributedModel, smp.partition if by_hand else None)
        optimizer = keras.optimizers.Adam(0.01)

        @smp.step
        def get_grads(x: Any, y: Any) -> Any:
            if own_tape:
                with tf.GradientTape() as tape:
                    predicted = model(x, training=True)
                    loss = loss_of(y, predicted)
                return tape.gradient(loss, model.trainable_variables), loss, predicted
            predicted = model(x, training=True)
            loss = loss_of(y, predicted)
            return smp.gradients(loss, model.trainable_variables), loss, predicted

        @smp.step
        def evaluate(x: Any, y: Any) -> Any:
            return loss_of(y, model(x, training=False))

        def train(x: Any, y: Any) -> Any:
            gradients, loss, predicted = get_grads(x, y)
            gradients = [g.accumulate() for g in gradients]
            if clip is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, clip)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.stack(), predicted.merge()

        train = tf.function(train) if traced else train
        losses = []
        for x, y in zip(*data(), strict=True):
            loss, predicted = train(tf.constant(x), tf.constant(y))
            losses += list(np.asarray(loss))
            assert predicted.shape == (ROWS, 1)
        x, y = (tf.constant(a[0]) for a in data())
        evaluated = float(evaluate(x, y).reduce_mean())
        left = [t.name for t in threading.enumerate() if t.name == "smp.step"]
        assert not left, left
        return {**weights(model), "losses": np.array(losses), "evaluated": np.array(evaluated)}


def hybrid() -> dict[str, np.ndarray]:
    """Two stages and two replicas, whose gradients `ktrainer.dataparallel` averages; the weights
    that are trained."""
    import keras
    import tensorflow as tf

    import ktrainer.dataparallel as sdp

    with started(partitions=2, microbatches=2) as smp:
        sdp.init(
            deadline=SECONDS,
            process_sets=[(copies := sdp.ProcessSet([0, 2])), (others := sdp.ProcessSet([1, 3]))],
        )
        rank, mine = sdp.rank(), copies if sdp.rank() % 2 == 0 else others
        model, optimizer = model_of(smp.DistributedModel, None, 0.0), keras.optimizers.Adam(0.01)

        @smp.step
        def get_grads(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)

        @tf.function
        def train(x: Any, y: Any) -> None:
            gradients = [sdp.allreduce(g.accumulate(), process_set=mine) for g in get_grads(x, y)]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for x, y in zip(*data(), strict=True):
            part = slice(0, ROWS // 2) if rank < 2 else slice(ROWS // 2, ROWS)
            train(tf.constant(x[part]), tf.constant(y[part]))
        sdp.shutdown()
        return {v.path: v.numpy() for v in model.trainable_variables}


def forward_only() -> tuple[float, float, str]:
    """The loss of a model in stages without backward passes, that of the same weights in one
    process, and what a gradient raises."""
    import tensorflow as tf

    from tests.dataparallel.helpers import caught

    with started(partitions=2, microbatches=4, pipeline="_only_forward") as smp:
        model = model_of(smp.DistributedModel)
        x, y = (tf.constant(a[0]) for a in data())

        @smp.step
        def evaluate(x: Any, y: Any) -> Any:
            return loss_of(y, model(x))

        @smp.step
        def train(x: Any, y: Any) -> Any:
            loss = loss_of(y, model(x))
            return smp.gradients(loss, model.trainable_variables)

        loss = float(evaluate(x, y).reduce_mean())
        error = caught(lambda: train(x, y))
        whole = model_of(__import__("keras").Model)
        return loss, float(loss_of(y, whole(x))), error


def branching() -> tuple[float, float]:
    """A body that branches on a tensor, inside of a `tf.function`: a loss, and twice that loss."""
    import tensorflow as tf

    with started(partitions=2, microbatches=2) as smp:
        model = model_of(smp.DistributedModel, drop=0.0)
        x, y = (tf.constant(a[0]) for a in data())

        @smp.step(non_split_inputs=["twice"])
        def evaluate(x: Any, y: Any, twice: Any) -> Any:
            loss = loss_of(y, model(x))
            if twice > 0:
                loss *= 2.0
            return loss

        @tf.function
        def traced(twice: Any) -> Any:
            return evaluate(x, y, twice).reduce_mean()

        return float(traced(tf.constant(0.0))), float(traced(tf.constant(1.0)))


def failures() -> dict[str, str]:
    """What goes wrong in a step, and says so; the same on every rank."""
    import threading

    import tensorflow as tf

    from tests.dataparallel.helpers import caught

    with started(partitions=2, microbatches=3) as smp:
        model = model_of(smp.DistributedModel)
        x, y = (tf.constant(a[0]) for a in data())
        seen = []
        smp.register_post_partition_hook(lambda: seen.append(len(model.trainable_variables)))

        def once(body: Any) -> str:
            return caught(lambda: smp.step(body)(x, y))

        found = {
            "outside": caught(lambda: model(x)),
            "no call": once(lambda x, y: x),
            "size": caught(lambda: smp.step(lambda x, y: model(x))(x[:4], y[:4])),
            "partition": caught(lambda: smp.partition(2).__enter__()),
            "name": caught(lambda: smp.step(lambda x: x, non_split_inputs=["z"])(x)),
            "nested": once(lambda x, y: smp.step(lambda x: model(x))(x)),
        }
        assert smp.step(lambda x, y: model(x))(x, y).merge().shape == (ROWS, 1)
        found["hooks"] = str(len(seen))
        part = [model.trainable_variables[0].value]
        found["norm"] = caught(lambda: tf.linalg.global_norm(part))
        more = [*(v.value for v in model.trainable_variables), tf.zeros([99])]
        found["more"] = caught(lambda: tf.linalg.global_norm(more))
        found["functional"] = caught(lambda: smp.DistributedModel(None, None))
        split = smp.step(lambda x, y: model(x), input_split_axes={"y": 1})
        found["axis"] = caught(split(x, tf.transpose(y)).merge)
        found["body"] = once(lambda x, y: 1 / 0 if model(x) is not None else 0)
        found["after"] = once(lambda x, y: model(x))
    with started(partitions=2, microbatches=3) as smp:
        model = model_of(smp.DistributedModel)

        def second_order(x: Any, y: Any) -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    predicted = model(x)
                loss = loss_of(y, predicted) + tf.reduce_sum(tape.gradient(predicted, x) ** 2)
            return outer.gradient(loss, model.trainable_variables)

        found["second order"] = once(second_order)
    with started(partitions=2, microbatches=3) as smp:
        model = model_of(smp.DistributedModel)
        other = y + tf.cast(smp.rank(), y.dtype)
        found["batch"] = caught(lambda: smp.step(lambda x, y: model(x))(x, other))
    with started(partitions=2, microbatches=3) as smp:
        tf.keras.config.set_dtype_policy("mixed_float16")
        model = model_of(smp.DistributedModel)
        tf.keras.config.set_dtype_policy("float64")
        found["float16"] = once(lambda x, y: model(x))
        found["threads"] = str([t.name for t in threading.enumerate() if t.name == "smp.step"])
        return found


def one_fails(rank: int) -> str:
    """What each rank raises when the body fails on rank 1 alone."""
    import tensorflow as tf

    from ktrainer.distributed import current_world
    from tests.dataparallel.helpers import caught

    with started(partitions=2, microbatches=2) as smp:
        model = model_of(smp.DistributedModel)
        x, y = (tf.constant(a[0]) for a in data())
        fails = False

        @smp.step
        def body(x: Any, y: Any) -> Any:
            predicted = model(x)
            if fails:
                raise ValueError("rank 1 alone")
            return loss_of(y, predicted)

        body(x, y)  # builds and compiles the model, which may take longer than the deadline
        fails = rank == 1
        world = current_world()
        before, world.deadline = world.deadline, 5.0
        try:
            error = caught(lambda: body(x, y))
        finally:
            world.deadline = before
        # As in a script that ends by the error: nothing waits for the other rank any more.
        world.record_interruption(RuntimeError("the step failed"))
        return error


def gan(staged: bool, own_tapes: bool = True) -> dict[str, np.ndarray]:
    """Weights and losses of a GAN, of two models and two optimizers; a variable of the script's own
    before the models; the second model has regularisers. In stages on this rank, or in one process.
    """
    if staged:
        with started(partitions=2, microbatches=3) as smp:
            return _gan(smp.DistributedModel, smp, own_tapes)
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return _gan(keras.Model, None, True)


def _gan(base: type, smp: Any, own_tapes: bool) -> dict[str, np.ndarray]:
    import keras
    import tensorflow as tf

    def dense(units: int, seed: int, activation: str | None = "tanh", **more: Any) -> Any:
        made = keras.initializers.GlorotUniform(seed=seed)
        name = f"dense_{seed}"
        return keras.layers.Dense(units, activation, kernel_initializer=made, name=name, **more)

    class Net(base):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__()
            self.parts = list(parts)

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    generator = Net(dense(6, 11), dense(7, 12), dense(5, 13, None))
    critic = Net(
        dense(8, 14, kernel_regularizer="l2"),
        dense(4, 15, activity_regularizer=keras.regularizers.L2(0.01)),
        dense(1, 16, None, kernel_regularizer="l1"),
    )
    scale = tf.Variable(1.5, dtype="float64")
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)]

    def losses(z: Any, x: Any) -> Any:
        fake = generator(z * scale, training=True)
        real_score, fake_score = critic(x, training=True), critic(fake, training=True)
        added = tf.add_n([tf.reduce_sum(loss) for loss in critic.losses])
        of_critic = tf.reduce_mean(tf.nn.softplus(fake_score) + tf.nn.softplus(-real_score))
        return of_critic + added, tf.reduce_mean(tf.nn.softplus(-fake_score))

    def body(z: Any, x: Any) -> Any:
        if own_tapes:
            with tf.GradientTape() as first, tf.GradientTape() as second:
                of_critic, of_generator = losses(z, x)
            g_critic = first.gradient(of_critic, critic.trainable_variables)
            g_generator = second.gradient(of_generator, [*generator.trainable_variables, scale])
        else:
            of_critic, of_generator = losses(z, x)
            g_critic = smp.gradients(of_critic, critic.trainable_variables)
            g_generator = smp.gradients(of_generator, [*generator.trainable_variables, scale])
        return g_critic, g_generator, of_critic, of_generator

    def in_one_process(z: Any, x: Any) -> Any:
        parts = [body(*each) for each in zip(tf.split(z, 3), tf.split(x, 3), strict=True)]
        return tf.nest.map_structure(lambda *each: tf.add_n(each) / len(each), *parts)

    def in_stages(z: Any, x: Any) -> Any:
        return tf.nest.map_structure(lambda output: output.accumulate(), smp.step(body)(z, x))

    compute = in_one_process if smp is None else in_stages

    def train(z: Any, x: Any) -> Any:
        g_critic, g_generator, *found = compute(z, x)
        *g_generator, g_scale = g_generator
        optimizers[0].apply(g_critic, critic.trainable_variables)
        optimizers[1].apply(g_generator, generator.trainable_variables)
        scale.assign_sub(0.1 * g_scale)
        return found

    train = train if smp is None else tf.function(train)
    z, x = data()[0], data()[0][::-1] ** 2
    found = [train(tf.constant(a), tf.constant(b)) for a, b in zip(z, x, strict=True)]
    return {
        **weights(generator),
        **weights(critic),
        "losses": np.array(found),
        "scale": scale.numpy(),
    }
