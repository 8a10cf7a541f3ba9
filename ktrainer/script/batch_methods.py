"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: one batch through a Trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import keras
from keras.src.trainers.data_adapters import data_adapter_utils

from ktrainer.callbacks.broadcast import broadcast_model, broadcast_once
from ktrainer.data.batch_specs import spec_of, widen
from ktrainer.data.data_digests import array_digest
from ktrainer.data.feed import Feed
from ktrainer.data.local_batch import LocalBatch, bounds, count_rows, take_slice
from ktrainer.data.rank_consistency import check_consistency, data_facts
from ktrainer.steps import Program
from ktrainer.steps.metric_reduction import global_results
from ktrainer.training.evaluation import evaluate, predict
from ktrainer.verify.first_update_check import UpdateFacts
from ktrainer.verify.known_differences import known_differences, print_new
from ktrainer.verify.update_split import split_of

if TYPE_CHECKING:
    from ktrainer.distributed import World
    from ktrainer.trainer import Trainer


# Sections whose keys `train_on_batch` does not read, and what steps read all the same.
_OF_FIT = ("run", "trainer", "data", "checkpoint", "lr", "logging", "watch", "health", "callbacks")
_OF_STEPS = (
    "trainer.precision", "trainer.xla", "trainer.clip", "trainer.loss_scope",
    "trainer.deterministic", "logging.progress", "logging.tensorflow", "health.verify",
)  # fmt: skip
_SHOWN = 8  # keys in one message


class OneBatch(Feed):
    """One batch, the same on every rank, of which this rank has its local batch.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, of arrays or tensors; `y` and weights
            may be None.
        world: the ranks.
        known: the spec of batches before this one, or None.
    """

    num_batches = 1

    def __init__(self, batch: tuple[Any, ...], world: World, known: Any) -> None:
        rows = count_rows(batch)
        start, stop = bounds(rows, world.replica, world.replicas)
        mine = take_slice(batch, rows, world.replica, world.replicas)
        self.local = LocalBatch(mine, stop - start, rows)
        self._batch = batch
        spec = spec_of(batch)
        if known is not None:
            wider = widen(known, spec)
            spec = known if wider == known else wider
        self.spec = spec

    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        yield self.local

    def peek(self, rows: int) -> Any:
        return self.local.batch

    def fingerprint(self) -> dict[str, str]:
        return {"batch": str([array_digest(leaf) for leaf in keras.tree.flatten(self._batch)])}


class BatchMethods:
    """Keras' methods for single batches.

    Args:
        trainer: provides the world and the programs.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._specs: WeakKeyDictionary[Program, dict[Any, Any]] = WeakKeyDictionary()
        self._equal: WeakSet[Program] = WeakSet()
        self._said = False

    def train_on_batch(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """`Model.train_on_batch`: one update."""
        model._assert_compile_called("train_on_batch")
        self._say_what_has_no_effect()
        if class_weight is not None:
            sample_weight = _weights_of_classes(y, sample_weight, class_weight)
        program, batch = self._open("train", model, (x, y, sample_weight))
        with self.trainer.backend.watching():
            is_new, cut = program not in self._equal, self.trainer.config.backend.name == "pipeline"
            if is_new and cut:  # look at it while each process has all of the model
                self._print_differences(model, batch)
            program.build(batch.spec)
            if is_new and not cut:
                self._print_differences(model, batch)
            if is_new:  # the optimizer's variables, too, which evaluating has not made
                broadcast_model(model, self.trainer.world, traced=True)
                self._equal.add(program)
                program.shared_variables = len(model.variables)
            model.reset_metrics()
            logs = program.train([batch.local])
            counted = batch.local.examples if program.counts_metrics else 0
            results = global_results(
                model.metrics,
                self.trainer.world,
                logs=program.finish() or logs,
                examples=counted,
                last_examples=counted,
                sources=program.sources("train"),
                of_step=True,
            )
        return results if return_dict else model._flatten_metrics_in_order(results)

    def test_on_batch(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """`Model.test_on_batch`."""
        model._assert_compile_called("test_on_batch")
        program, batch = self._open("test", model, (x, y, sample_weight))
        with self.trainer.backend.watching():
            callbacks = _no_callbacks(model)
            results = evaluate(program, batch, callbacks, self.trainer.world, of_step=True)
        return results if return_dict else model._flatten_metrics_in_order(results)

    def predict_on_batch(self, model: keras.Model, x: Any) -> Any:
        """`Model.predict_on_batch`, with the result on every rank."""
        program, batch = self._open("predict", model, (x,))
        with self.trainer.backend.watching():
            broadcast_once(program, self.trainer.world)
            return predict(program, batch, _no_callbacks(model), self.trainer.world)

    def _print_differences(self, model: keras.Model, batch: OneBatch) -> None:
        """Print what of a model cannot equal one process."""
        trainer = self.trainer
        split = replace(split_of(trainer.config, trainer.plan), accumulate=1)
        lines = known_differences(model, batch, split, UpdateFacts())
        print_new(lines, trainer.state.differences_said, trainer.world)

    def _say_what_has_no_effect(self) -> None:
        """Name, at the first update of a script that has not called `fit`, the keys that
        `train_on_batch` does not read."""
        if self._said or self.trainer.state.fits:
            return
        self._said, config = True, self.trainer.config
        given = [key for key in config._origins if config.origin(key) is not None]
        keys = [k for k in given if k.split(".")[0] in _OF_FIT and not k.startswith(_OF_STEPS)]
        if keys and self.trainer.world.is_root:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            print(
                f"ktrainer run: no effect on train_on_batch: {', '.join(keys[:_SHOWN])}{more}. "
                "It reads none of these; do it in the script, or let fit train",
                file=sys.stderr,
                flush=True,
            )

    def _open(
        self, kind: str, model: keras.Model, parts: tuple[Any, ...]
    ) -> tuple[Program, OneBatch]:
        """The program of `model`, and a batch of which this rank takes its part; ranks compare the
        first one. A step of the user's own is given all parts, as by Keras' method; Keras' own
        steps those that feeds have, so that the compiled step is the same."""
        step = getattr(model, f"{kind}_step")
        if getattr(step, "__func__", None) is getattr(keras.Model, f"{kind}_step"):
            while len(parts) > 1 and parts[-1] is None:
                parts = parts[:-1]
        program = self.trainer.program_for(model)
        specs = self._specs.setdefault(program, {})
        given = (kind, *(part is not None for part in parts))
        batch = OneBatch(parts, self.trainer.world, specs.get(given))
        if given not in specs and self.trainer.world.size > 1:
            check_consistency(self.trainer.world, data_facts=data_facts(batch, "given"))
        specs[given] = batch.spec
        return program, batch


def _weights_of_classes(y: Any, sample_weight: Any, class_weight: Any) -> Any:
    if sample_weight is not None:
        raise ValueError(
            "Arguments `sample_weight` and `class_weight` cannot be specified at the same "
            f"time. Received: sample_weight={sample_weight}, class_weight={class_weight}"
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def _no_callbacks(model: keras.Model) -> keras.callbacks.CallbackList:
    return keras.callbacks.CallbackList([], model=model, add_history=False)
