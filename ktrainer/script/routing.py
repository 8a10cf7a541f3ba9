"""`Model.fit` and its like go through a Trainer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer as BaseTrainer

from ktrainer.callbacks.base import collectives_off
from ktrainer.errors import ModelError
from ktrainer.script.batches import Batches
from ktrainer.script.callbacks import common_batch_logs, on_ranks
from ktrainer.script.diagnostics import refuse_loops, watch_files
from ktrainer.script.files import route_files, several
from ktrainer.script.replace import Replacements
from ktrainer.script.stages import borrowed, join_stages, know_variables
from ktrainer.script.strategies import route_strategies
from ktrainer.trainer import Trainer

_METHODS = ("fit", "evaluate", "predict")
_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


class Routing:
    """Keras' methods go through `trainer` from now on, until `close`.

    A Trainer that the script makes itself ends it.

    Attributes:
        trainer: made from the command line.
        running: the models of routed calls that are under way, one inside another.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.running: list[keras.Model] = []
        self._replaced = Replacements()
        replace = self._replaced.replace
        for name in _METHODS:
            replace(TensorFlowTrainer, name, functools.partial(self._route_method, name))
        batches = Batches(trainer)
        for name in _BATCHES:
            make = functools.partial(self._batch, getattr(batches, name))
            replace(TensorFlowTrainer, name, make)
        route_files(trainer, self._replaced, self._borrowed)
        route_strategies(trainer, self._replaced)
        self._cut: dict[int, keras.Model] = {}
        self._joins = 0
        self._traced_at: WeakKeyDictionary[keras.Model, int] = WeakKeyDictionary()
        if trainer.backend.name == "pipeline":
            # Where it is defined: Keras tells by that whether a model has its own.
            replace(BaseTrainer, "compile", self._compile)
            replace(keras.Model, "get_weights", self._read)
        if splits(trainer):
            refuse_loops(trainer, self._replaced, lambda: bool(self.running))
        if several(trainer.world):
            watch_files(trainer.world.rank)
        replace(Trainer, "__init__", self._own_trainer)

    def close(self) -> None:
        """Put Keras back as it was, and let go of the Trainer."""
        self._replaced.close()
        self.trainer.close()

    def _own_trainer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(made: Trainer, *args: Any, **kwargs: Any) -> None:
            self.close()
            original(made, *args, **kwargs)

        return init

    def _route_method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Model.fit`, `evaluate` or `predict` by the method of the Trainer of that name."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def routed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            if collectives_off():
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
            if several(self.trainer.world) and name != "predict":
                given["callbacks"], common = on_ranks(given.get("callbacks"), self.trainer)
            self._join_others(model)
            logs = common_batch_logs(self.trainer) if common else nullcontext()
            with self._routed(model), logs:
                return getattr(self.trainer, name)(model, **given)

        return routed

    def _batch(self, run: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """`Model.train_on_batch` and its like by `run`."""

        @functools.wraps(original)
        def routed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            trains = original.__name__ == "train_on_batch"
            if collectives_off():
                return original(model, *args, **kwargs)
            if not trains and self._runs_whole(model):
                with self._whole(model):
                    return original(model, *args, **kwargs)
            self._join_others(model)
            with self._routed(model):
                return run(model, *args, **kwargs)

        return routed

    def _compile(self, original: Callable[..., None]) -> Callable[..., None]:
        """A model that is cut into stages is cut again when it is compiled again."""

        @functools.wraps(original)
        def compile(model: keras.Model, *args: Any, **kwargs: Any) -> None:
            self._join(model)
            original(model, *args, **kwargs)

        return compile

    def _join_others(self, model: keras.Model) -> None:
        """Have the stages of models together with which `model` shares variables: its own cut is
        another one."""
        if self.trainer.backend.name != "pipeline":
            return
        self._join_sharing(model)
        if id(model) not in self._cut:
            know_variables(model)
            self._cut[id(model)] = model

    def _runs_whole(self, model: keras.Model) -> bool:
        """Whether this is a pipeline, and a model that it has not cut, of which every process has
        all: Keras itself evaluates it, and predicts, on every rank alike."""
        return self.trainer.backend.name == "pipeline" and id(model) not in self._cut

    @contextmanager
    def _whole(self, model: keras.Model) -> Iterator[None]:
        """While it lasts, every process has all of `model`, which is not cut. Models that share
        variables with it stay cut while one of them trains."""
        if not self.running:
            self._join_sharing(model)
            if self._traced_at.get(model) != self._joins:  # variables have other values inside
                model.test_function = model.predict_function = None
                self._traced_at[model] = self._joins
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
        """While it lasts, values of `model` can be read that models in stages hold."""
        with borrowed(model, list(self._cut.values())):
            yield

    def _read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Model.get_weights` of a model that shares variables with one in stages."""

        @functools.wraps(original)
        def read(model: keras.Model) -> Any:
            if collectives_off() or id(model) in self._cut:
                return original(model)
            with self._borrowed(model):
                return original(model)

        return read

    def _join_sharing(self, model: keras.Model) -> None:
        """Put together the stages of other models that share variables with `model`."""
        mine = {id(v) for v in model.variables}
        for other in list(self._cut.values()):
            if other is not model and mine & {id(v) for v in other.variables}:
                self._join(other)

    def _join(self, model: keras.Model) -> None:
        if any(each is model for each in self.running):
            raise ModelError(
                f"model {model.name!r} is being trained in stages, and a callback compiles it, or "
                "trains a model that shares layers with it. Do that after `fit`, or run with "
                "backend=data_parallel."
            )
        if self._cut.pop(id(model), None) is not None:
            join_stages(model)
            self._joins += 1

    @contextmanager
    def _routed(self, model: keras.Model) -> Iterator[None]:
        self.running.append(model)
        try:
            yield
        finally:
            self.running.pop()


def splits(trainer: Trainer) -> bool:
    """Whether a batch is shared by several ranks, replicas or stages."""
    strategy = getattr(trainer.backend, "strategy", None)
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return several(trainer.world) or replicas > 1 or trainer.backend.name == "pipeline"


def _as_trainer(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a method of Keras for the Trainer's."""
    x = given.get("x")
    if isinstance(x, tuple) and given.get("y") is None and given.get("sample_weight") is None:
        given["x"] = (x,)  # for Keras it is inputs alone
    if name == "fit":
        given.setdefault("epochs", 1)
    if name == "evaluate":
        given.setdefault("return_dict", False)
    return given
