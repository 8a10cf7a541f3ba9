"""Route `Model.fit` and other methods of Keras through the Trainer that `bootstrap` makes."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer as BaseTrainer

from ktrainer.backends.pipeline.gather_stages import borrowed, gather_stages, know_variables
from ktrainer.callbacks.base import collectives_off
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import Replacements
from ktrainer.script.batch_methods import BatchMethods
from ktrainer.script.keras_callbacks import common_batch_logs, on_ranks
from ktrainer.script.shared_files import has_other_ranks, route_files
from ktrainer.script.unsupported_patterns import refuse_loops, watch_files
from ktrainer.script.user_strategies import route_devices, route_strategies
from ktrainer.trainer import Trainer

_METHODS = ("fit", "evaluate", "predict")
_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


class Routing:
    """Routes methods of Keras through `trainer` until `close`, or until the script makes a Trainer.

    Attributes:
        trainer: made from the command line.
        running: the models of active routed calls, the innermost last.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.running: list[keras.Model] = []
        self._thread = threading.current_thread()  # of the script
        self._replaced = Replacements()
        wrap = self._replaced.wrap
        for name in _METHODS:
            wrap(TensorFlowTrainer, name, functools.partial(self._route_method, name))
        batches = BatchMethods(trainer)
        for name in _BATCHES:
            make = functools.partial(self._route_batch_method, getattr(batches, name))
            wrap(TensorFlowTrainer, name, make)
        route_files(trainer, self._replaced, self._borrowed)
        route_strategies(trainer, self._replaced)
        if has_other_ranks(trainer.world) or trainer.backend.strategy is not None:
            route_devices(trainer, self._replaced)
        self._cut: dict[int, keras.Model] = {}
        self._gathers = 0
        self._traced_at: WeakKeyDictionary[keras.Model, int] = WeakKeyDictionary()
        if trainer.backend.name == "pipeline":
            # In the class that defines it, by which Keras recognises a model's own `compile`.
            wrap(BaseTrainer, "compile", self._compile)
            wrap(keras.Model, "get_weights", self._read)
        if splits(trainer):
            refuse_loops(trainer, self._replaced, lambda: bool(self.running))
        if has_other_ranks(trainer.world):
            watch_files(trainer.world.rank)
        wrap(Trainer, "__init__", self._close_first)

    def close(self) -> None:
        """Restore Keras, and close the Trainer."""
        self._replaced.close()
        self.trainer.close()

    def _close_first(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(made: Trainer, *args: Any, **kwargs: Any) -> None:
            self.close()
            original(made, *args, **kwargs)

        return init

    def _route_method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Route `Model.fit`, `evaluate` or `predict` to the Trainer's method of that name."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def routed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            if collectives_off() or self._in_other_thread(model, name):
                return original(model, *args, **kwargs)
            if name != "fit" and self._runs_whole(model):
                with self._whole(model):
                    return original(model, *args, **kwargs)
            if name != "predict":
                model._assert_compile_called(name)
            given = dict(signature.bind(model, *args, **kwargs).arguments)
            given = {k: v for k, v in given.items() if k not in ("self", "kwargs")}
            given = _as_trainer(name, given)
            common = False
            if has_other_ranks(self.trainer.world) and name != "predict":
                given["callbacks"], common = on_ranks(given.get("callbacks"), self.trainer)
            self._gather_others(model)
            logs = common_batch_logs(self.trainer) if common else nullcontext()
            with self._routed(model), logs:
                return getattr(self.trainer, name)(model, **given)

        return routed

    def _route_batch_method(
        self, run: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Route `Model.train_on_batch` and similar methods to `run`."""

        @functools.wraps(original)
        def routed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            name = original.__name__
            if collectives_off() or self._in_other_thread(model, name):
                return original(model, *args, **kwargs)
            if name != "train_on_batch" and self._runs_whole(model):
                with self._whole(model):
                    return original(model, *args, **kwargs)
            self._gather_others(model)
            with self._routed(model):
                return run(model, *args, **kwargs)

        return routed

    def _in_other_thread(self, model: keras.Model, name: str) -> bool:
        """Return whether a method is called beside the script's thread, as code that makes batches
        may: at moments that differ between ranks, so that each runs it whole, by itself.

        A thread that trains while no call runs is the script's from there on.
        """
        here, backend = threading.current_thread(), self.trainer.backend
        if not self._thread.is_alive():
            self._thread = here
        if here is self._thread or not has_other_ranks(self.trainer.world):
            return False
        trains = name in ("fit", "train_on_batch")
        if not (trains or backend.strategy is not None or id(model) in self._cut):
            return True
        if self.running:
            raise ModelError(
                f"`{name}` of model {model.name!r} was called in thread {here.name!r} (such as "
                "those that read data ahead) while the script's thread trains or evaluates. Ranks "
                "communicate for it, which they cannot do in two threads at once. Call it in the "
                "script before `fit`, or in a callback."
            )
        self._thread = here
        return False

    def _compile(self, original: Callable[..., None]) -> Callable[..., None]:
        """Join the stages of a model that is compiled again; it is cut again later."""

        @functools.wraps(original)
        def compile(model: keras.Model, *args: Any, **kwargs: Any) -> None:
            self._gather(model)
            original(model, *args, **kwargs)

        return compile

    def _gather_others(self, model: keras.Model) -> None:
        """Join the stages of other models that share variables with `model`, whose own cut
        differs."""
        if self.trainer.backend.name != "pipeline":
            return
        self._gather_sharing(model)
        if id(model) not in self._cut:
            know_variables(model)
            self._cut[id(model)] = model

    def _runs_whole(self, model: keras.Model) -> bool:
        """Return whether every process of a pipeline has all of `model`, which is not cut; Keras
        itself then evaluates and predicts on every rank."""
        return self.trainer.backend.name == "pipeline" and id(model) not in self._cut

    @contextmanager
    def _whole(self, model: keras.Model) -> Iterator[None]:
        """Within the block, every process has all of `model`, which is not cut. Models that share
        variables with it stay cut while one of them trains."""
        if not self.running:
            self._gather_sharing(model)
            if self._traced_at.get(model) != self._gathers:  # variables have other values inside
                model.test_function = model.predict_function = None
                self._traced_at[model] = self._gathers
            yield
            return
        model.test_function = model.predict_function = None
        try:
            with self._borrowed(model):
                yield
        finally:
            model.test_function = model.predict_function = None

    @contextmanager
    def _borrowed(self, model: keras.Model) -> Iterator[None]:
        """Within the block, values of `model` that models in stages hold can be read."""
        with borrowed(model, list(self._cut.values())):
            yield

    def _read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let `Model.get_weights` read variables that are shared with a model in stages."""

        @functools.wraps(original)
        def read(model: keras.Model) -> Any:
            if collectives_off() or id(model) in self._cut:
                return original(model)
            with self._borrowed(model):
                return original(model)

        return read

    def _gather_sharing(self, model: keras.Model) -> None:
        """Join the stages of other models that share variables with `model`."""
        mine = {id(v) for v in model.variables}
        for other in list(self._cut.values()):
            if other is not model and mine & {id(v) for v in other.variables}:
                self._gather(other)

    def _gather(self, model: keras.Model) -> None:
        if any(each is model for each in self.running):
            raise ModelError(
                f"model {model.name!r} is being trained in stages, and a callback compiles it, or "
                "trains a model that shares layers with it. Do that after `fit`, or run with "
                "backend=data_parallel."
            )
        if self._cut.pop(id(model), None) is not None:
            gather_stages(model)
            self._gathers += 1

    @contextmanager
    def _routed(self, model: keras.Model) -> Iterator[None]:
        self.running.append(model)
        try:
            yield
        finally:
            self.running.pop()


def splits(trainer: Trainer) -> bool:
    """Return whether a batch is divided among several ranks, replicas or stages."""
    strategy = trainer.backend.strategy
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return has_other_ranks(trainer.world) or replicas > 1 or trainer.backend.name == "pipeline"


def _as_trainer(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments of a method of Keras to those of the Trainer's."""
    x = given.get("x")
    if isinstance(x, tuple) and given.get("y") is None and given.get("sample_weight") is None:
        given["x"] = (x,)  # for Keras it is inputs alone
    if name == "fit":
        given.setdefault("epochs", 1)
    if name == "evaluate":
        given.setdefault("return_dict", False)
    return given
