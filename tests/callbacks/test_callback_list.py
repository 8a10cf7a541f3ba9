"""Batch events reach all callbacks that have them, as under Keras."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras

from ktrainer import Callback
from tests.small import BATCH, build, data, trainer


class Heard:
    """Callbacks that count their batch events in `counts`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def counter(self, name: str) -> Any:
        def count(*args: Any, logs: Any = None) -> None:
            self.counts[name] += 1

        return count

    def callbacks(self) -> list[Any]:
        def method(name: str) -> Any:
            return lambda this, batch, logs=None: self.counter(name)()

        keras_base, own_base = keras.callbacks.Callback, Callback
        old_name = type("OldName", (keras_base,), {"on_batch_end": method("old name")})
        ours = type("Ours", (own_base,), {"on_batch_begin": method("old name of ours")})
        mixin = type("Mixin", (), {"on_train_batch_end": method("mixin")})
        mixed = type("Mixed", (mixin, own_base), {})
        inner = type("Inner", (keras_base,), {"on_train_batch_end": method("passed on")})
        listed = type("Listed", (keras_base,), {"on_train_batch_begin": method("in a list")})
        later = type("Later", (keras_base,), {})

        def change(batch: int, logs: Any = None) -> None:
            if batch == 1:
                later.on_train_batch_end = method("set on the class")  # type: ignore[attr-defined]

        return [
            old_name(),
            ours(),
            mixed(),
            PassesOn(inner()),
            keras.callbacks.CallbackList([listed()]),
            keras.callbacks.LambdaCallback(on_train_batch_end=self.counter("function")),
            keras.callbacks.LambdaCallback(on_train_batch_end=change),
            later(),
        ]


class PassesOn:
    """Passes all events on; not a Keras callback itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_batch_events_are_those_of_keras() -> None:
    ours, keras_own = Heard(), Heard()
    with trainer() as it:
        it.fit(build, data(), callbacks=ours.callbacks())
    build().fit(*data(), batch_size=BATCH, callbacks=keras_own.callbacks(), verbose=0)
    assert ours.counts == keras_own.counts
    assert len(ours.counts) == 7
