"""The whole state comes back, or nothing changes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import distributed
from ktrainer.callbacks import Callback
from ktrainer.checkpoint import capture
from ktrainer.checkpoint.contents.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.contents.plain_attributes import note_attributes
from ktrainer.checkpoint.contents.run_snapshot import take_snapshot
from ktrainer.checkpoint.format.value_encoding import decode_json, encode_json
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from ktrainer.state.progress import Progress
from tests.callbacks.helpers import data, everything, fit, small_model
from tests.checkpoint.whole import restore_state

ALONE = SingleWorld()


def same(a: Any, b: Any) -> None:
    for x, y in zip(everything(a), everything(b), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


@pytest.mark.quick("lion")
@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "loss_scale", "schedule"])
def test_everything_comes_back(optimizer: str) -> None:
    def make() -> Any:
        if optimizer == "loss_scale":
            chosen = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        elif optimizer == "schedule":
            chosen = keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(0.1, 20), use_ema=True
            )
        else:
            chosen = keras.optimizers.get(optimizer)
        return small_model(chosen)

    model = make()
    fit(model, [])
    arrays, state = capture(model, Progress(epoch=1, step=5), ALONE)
    other = make()
    assert restore_state(other, arrays, state, ALONE) == Progress(epoch=1, step=5)
    same(model, other)
    # Goes on as if nothing had happened: weights, dropout masks and slots.
    fit(model, [])
    fit(other, [])
    same(model, other)


def test_mixed_precision_and_seeds() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = small_model()
    keras.random.normal((2,))  # moves Keras' global seed generator
    fit(model, [])
    arrays, state = capture(model, Progress(), ALONE)
    expected = keras.random.normal((4,)).numpy()
    other = small_model(seed=9)
    restore_state(other, arrays, state, ALONE)
    same(model, other)
    np.testing.assert_array_equal(keras.random.normal((4,)).numpy(), expected)


def towers(*names: str) -> Any:
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    y = keras.layers.Add()([keras.layers.Dense(1, name=name)(x) for name in names])
    model = keras.Model(x, y)
    model.compile("adam", "mse", run_eagerly=True)
    return model


def test_layers_in_another_order_are_refused() -> None:
    """Were they paired in order, each would get the weights and slots of the other."""
    model, other = towers("tower_1", "tower_2"), towers("tower_2", "tower_1")
    fit(model, [])
    arrays, state = capture(model, Progress(), ALONE)
    with pytest.raises(CheckpointError, match="layers are in another order"):
        restore_state(other, arrays, state, ALONE)
    shifted = towers("tower_2", "tower_3")  # as Keras numbers them, where others were before
    restore_state(shifted, arrays, state, ALONE)
    same(model, shifted)


class TwoOptimizers(keras.Model):
    """As a GAN: two networks, two optimizers, both made outside of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(3), keras.layers.Dense(1)
        self.ours = {"one": keras.optimizers.Adam(), "two": [keras.optimizers.SGD(momentum=0.9)]}

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))

    def train_step(self, batch: Any) -> Any:
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        for layer, optimizer in ((self.one, self.ours["one"]), (self.two, self.ours["two"][0])):
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_several_optimizers_not_yet_built() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = TwoOptimizers()
        model.compile()
        model(data()[0])
        return model

    model, other = make(), make()
    fit(model, [])
    arrays, state = capture(model, Progress(), ALONE)
    restore_state(other, arrays, state, ALONE)
    fit(model, [])
    fit(other, [])
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class Counts(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_states_of_callbacks() -> None:
    def make() -> list[Any]:
        stop = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
        return [stop, keras.callbacks.ReduceLROnPlateau("loss"), Counts(), Counts()]

    first, second = make(), make()
    first[2].count, first[3].count = 3, 4
    fit(small_model(), first[:2], epochs=3)
    states, arrays = callback_states(first)
    load_callback_states([keras.callbacks.LambdaCallback(), *second], states, arrays)
    assert (second[2].count, second[3].count) == (3, 4)
    for name in ("wait", "best", "best_epoch", "stopped_epoch"):
        assert getattr(second[0], name) == getattr(first[0], name)
    assert second[1].best == first[1].best
    for a, b in zip(first[0].best_weights, second[0].best_weights, strict=True):
        np.testing.assert_array_equal(a, b)
    load_callback_states([Counts()], states, arrays)  # fewer callbacks than before


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_state_goes_to_the_callback_of_the_same_metric() -> None:
    def make(*monitors: str) -> list[Any]:
        stop = partial(keras.callbacks.EarlyStopping, patience=9, restore_best_weights=True)
        return [stop(monitor) for monitor in monitors]

    first = make("loss", "mae")
    fit(small_model(), first, epochs=3)
    assert first[0].best != first[1].best
    states, arrays = callback_states(first)
    swapped, alone, other = make("mae", "loss"), make("mae"), make("val_loss")
    load_callback_states(swapped, states, arrays)
    assert [stop.best for stop in swapped] == [first[1].best, first[0].best]
    load_callback_states(alone, states, arrays)
    assert alone[0].best == first[1].best
    with pytest.warns(UserWarning, match="it monitors val_loss, and the checkpoint's"):
        load_callback_states(other, states[:1], arrays)
    assert (other[0].best, other[0].best_weights) == (None, None)


class CountingStop(Counts, keras.callbacks.EarlyStopping):
    def __init__(self, **settings: Any) -> None:
        keras.callbacks.EarlyStopping.__init__(self, **settings)
        self.count = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        keras.callbacks.EarlyStopping.on_epoch_end(self, epoch, logs)
        self.count += 1


def test_a_class_derived_from_keras_looks_for_less_after_a_resume() -> None:
    """Keras changes the sign of `min_delta` as it sees the first value."""

    class Stops(keras.callbacks.EarlyStopping):
        pass

    def make() -> Any:
        callback = Stops("loss", min_delta=0.05, patience=1)
        callback.set_model(small_model())
        callback.on_train_begin()
        note_attributes([callback])
        return callback

    first, second = make(), make()
    first.on_epoch_end(0, {"loss": 1.0})
    load_callback_states([second], *callback_states([first]))
    for callback in (first, second):
        callback.on_epoch_end(1, {"loss": 1.04})  # worse
        assert (callback.min_delta, callback.wait, callback.best) == (-0.05, 1, 1.0)


class CoolingDown(Callback, keras.callbacks.ReduceLROnPlateau):
    """With the `state_dict` of the base class, which is empty."""

    def on_train_begin(self, logs: Any = None) -> None:
        keras.callbacks.ReduceLROnPlateau.on_train_begin(self, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        keras.callbacks.ReduceLROnPlateau.on_epoch_end(self, epoch, logs)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_class_derived_from_keras_keeps_both_states() -> None:
    def make() -> list[Any]:
        settings = {"monitor": "loss", "mode": "max", "patience": 9, "restore_best_weights": True}
        return [CountingStop(**settings), CoolingDown("loss", mode="max", patience=1, cooldown=9)]

    first, second = make(), make()
    fit(small_model(), first, epochs=3)  # the loss falls, which is taken for getting worse
    states, arrays = callback_states(first)
    load_callback_states(second, decode_json(encode_json(states)), arrays)
    stop, plateau = second
    assert (stop.count, stop.wait, stop.best_epoch) == (3, 2, 0)
    assert stop.best == float(first[0].best)
    assert plateau.best == float(first[1].best)
    assert plateau.cooldown_counter == first[1].cooldown_counter > 0


def test_keys_that_are_no_strings_come_back() -> None:
    model, first, second = small_model(), Counts(), Counts()
    count: Any = {"of labels": [{3: 1, None: {np.int64(4): np.float32(0.5)}, "3": {}}], True: 2}
    first.count = count
    saved = decode_json(take_snapshot(model, Progress(), ALONE, [first]).state)
    load_callback_states([second], saved["callbacks"], {})
    assert second.count == count
    first.count = {(1, 2): 1}  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"not \(1, 2\).*The `state_dict` of a callback must"):
        take_snapshot(model, Progress(), ALONE, [first])


def test_items_that_no_run_can_have_written_are_refused() -> None:
    for text in (b'{"__items__": [[[1], 2]]}', b'{"__items__": 3}', b'{"__items__": [1]}'):
        with pytest.raises(ValueError):
            decode_json(text)


class BestOfEach(keras.callbacks.ModelCheckpoint):
    """Uses an attribute of Keras' class in its own way, and computes another."""

    _last_batch_seen = property(lambda self: 7, lambda self, value: None)

    def __init__(self, best: Any) -> None:
        super().__init__("{epoch}.keras")
        self.best = best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


@pytest.mark.parametrize("best", [{"loss": 0.5}, [0.5, 0.7], "0.5", np.ones(2)])
def test_attributes_that_are_no_numbers_are_left_to_the_class(
    best: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = BestOfEach(best), BestOfEach(None)
    states, arrays = callback_states([first])
    assert sorted(states[0]["attributes"]) == [
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ]
    monkeypatch.setattr(BestOfEach, "_last_batch_seen", property(lambda self: 7))
    load_callback_states([second], decode_json(encode_json(states)), arrays)
    np.testing.assert_equal(second.best, best)


def test_a_checkpoint_sets_no_other_attributes() -> None:
    stop = keras.callbacks.EarlyStopping()
    name = "keras.src.callbacks.early_stopping.EarlyStopping#1"
    for attributes in ("attributes", "state"):  # of this version, and of earlier ones
        saved = {"state": {}, attributes: {"monitor": "x", "wait": 2}, "weights": {"model": 0}}
        stop.wait = 0
        load_callback_states([stop], [{"callback": name, **saved}], {})
        assert (stop.monitor, stop.wait) == ("val_loss", 2)


def _half_an_epoch(rows: slice | None = None) -> Any:
    """A model whose metrics stand in the middle of an epoch."""
    model = small_model(keras.optimizers.SGD(0.0))
    x, y = data(40)
    here = distributed.current_world()
    mine = np.arange(40)[here.rank :: here.size]
    fit(model, [], rows=10)
    model.reset_metrics()
    for metric in model.metrics:  # what a step does, without one
        if metric.name == "loss":
            metric.update_state(float(here.rank), sample_weight=len(mine))
        else:
            metric.update_state(y[mine], x[mine, :1])
    return model


def _metrics_to_the_same_ranks() -> list[tuple[bytes, bytes]]:
    here = distributed.current_world()
    model = _half_an_epoch()
    before = [v.numpy().tobytes() for v in model.metrics_variables]
    arrays, state = capture(model, Progress(batch=3, step=3), here)
    model.reset_metrics()
    restore_state(model, arrays, state, here)
    after = [v.numpy().tobytes() for v in model.metrics_variables]
    return list(zip(before, after, strict=True))


def test_metrics_in_mid_epoch_are_each_ranks_own(ranks) -> None:
    for pairs in ranks(2).run(_metrics_to_the_same_ranks):
        assert all(before == after for before, after in pairs)


def _capture_half_an_epoch() -> Any:
    return capture(_half_an_epoch(), Progress(batch=3, step=3), distributed.current_world())


def test_metrics_on_another_number_of_ranks_keep_their_sum(ranks) -> None:
    every = ranks(2).run(_capture_half_an_epoch)
    arrays, state = every[0]
    model = _half_an_epoch()
    restore_state(model, arrays, state, ALONE)
    loss = model.metrics[0]
    assert float(loss.count) == 40
    assert float(loss.result()) == 0.5  # rank 0 logged zeros, rank 1 ones

    model.compile("sgd", "mse", metrics=["mae", "mape"])
    fit(model, [], rows=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arrays = {k: v for k, v in arrays.items() if not k.startswith("optimizer/")}
        full, _ = capture(model, Progress(), ALONE)
        arrays |= {k: v for k, v in full.items() if k.startswith("optimizer/")}
        restore_state(model, arrays, state, ALONE)
    assert any("other metrics" in str(w.message) for w in caught)
