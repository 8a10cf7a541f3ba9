"""One matrix of backend x case: train in one process and under a pipeline, compare everything.

The truth of a case is `local`, which sees the very microbatches of the pipeline as batches whose
gradients accumulate, or, where losses are of whole batches, `Model.fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktrainer.callbacks import Callback
from tests.pipeline.trained import BUILD, ROWS, data_of

LOCAL, FIT = ("backend=local",), ()  # the latter: `Model.fit`


@dataclass(frozen=True)
class Case:
    """One training, whatever runs it.

    Attributes:
        model: a key of `BUILD`.
        floatx: the float type, or a mixed policy.
        rows, batch, microbatches: 338 rows are 17 updates an epoch; microbatches
            are those of all replicas together.
        accumulate: batches an update.
        settings: more configuration.
        weighted: with a weight for each target.
        class_weight: with a weight for each class.
        instance: the model is made before `fit`.
        callbacks: with those of `callbacks()`.
        gradients: keep those of the last update.
        truth: the words that choose what it is compared with.
    """

    model: str
    epochs: int = 1
    floatx: str = "float64"
    rows: int = ROWS
    batch: int = 20
    microbatches: int = 4
    accumulate: int = 1
    settings: tuple[str, ...] = ()
    weighted: bool = False
    class_weight: bool = False
    instance: bool = False
    callbacks: bool = False
    gradients: bool = False
    truth: tuple[str, ...] = LOCAL


@dataclass
class Outcome:
    """What a training left behind on one rank.

    Attributes:
        names: of all variables of the model and its optimizer.
        held: the values of those that are here, by name.
        history: Keras' History.
        evaluated: logs of an evaluation.
        predicted: outputs, flat.
        batches: logs after each update; with replicas, where each has its own, none.
        gradients: of the last update, dense, by name of the variable; where they are.
        more: what EarlyStopping has to say.
    """

    names: list[str]
    held: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: list[np.ndarray]
    batches: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


class Notes(Callback):
    """Keeps the logs of each update, and the gradients of the last one."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []
        self.gradients: dict[str, np.ndarray] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append({key: float(value) for key, value in logs.items()})


class NotesGradients(Notes):
    """With gradients, which the step then hands to Python."""

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        import tensorflow as tf

        names = {id(v): name for name, v in named(self.model)}
        here = [names[id(v)] for v in variables]
        present = [(n, g) for n, g in zip(here, gradients, strict=True) if g is not None]

        def note(*values: Any) -> None:
            for (name, _), value in zip(present, values, strict=True):
                self.gradients[name] = value.numpy()

        tf.py_function(note, [tf.convert_to_tensor(g) for _, g in present], [])
        return gradients


def callbacks() -> list[Any]:
    """Callbacks that act on what is logged: at every validation the rate is halved, and after
    the third of them the weights are again those after the first."""
    import keras

    return [
        keras.callbacks.EarlyStopping("val_loss", 10, 2, mode="max", restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10),
    ]


def parts_of(rows: int, batch: int, parts: int) -> Iterator[slice]:
    """The rows of each microbatch, of batches that are cut as a pipeline cuts them."""
    from ktrainer.data.local_batch import bounds

    for start in range(0, rows, batch):
        size = min(batch, rows - start)
        for part in range(min(parts, size)):
            first, last = bounds(size, part, min(parts, size))
            yield slice(start + first, start + last)


def dataset(data: Any, rows: int, batch: int, parts: int = 1) -> Any:
    """Data that comes in these parts."""
    import keras

    class Parts(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [
                keras.tree.map_structure(lambda x, cut=cut: x[cut], data)
                for cut in parts_of(rows, batch, parts)
            ]

        def __len__(self) -> int:
            return len(self.parts)

        def __getitem__(self, index: int) -> Any:
            return self.parts[index]

    return Parts()


def configure(floatx: str) -> None:
    """Set Keras' float type, or its policy."""
    import keras

    keras.utils.clear_session()
    keras.config.set_floatx(floatx if floatx == "float64" else "float32")
    keras.config.set_dtype_policy(floatx)


def words_of(case: Case, backend: tuple[str, ...]) -> list[str]:
    """The configuration of a case under a backend."""
    accumulate = case.accumulate * (case.microbatches if backend == LOCAL else 1)
    return [
        *backend,
        f"trainer.epochs={case.epochs}",
        f"trainer.accumulate={accumulate}",
        "logging.progress=none",
        "logging.csv=false",
        "world.deadline=60",
        "data.shuffle=false",  # one process has the microbatches as batches of their own
        *case.settings,
    ]


def train(case: Case, backend: tuple[str, ...] = LOCAL, save: str | None = None) -> Outcome:
    """Run a case on this rank; `save` is a file for the whole model."""
    from ktrainer import Trainer

    configure(case.floatx)
    data = data_of(case.model, case.rows)
    if case.weighted:  # for each example, or each token
        data += (np.random.default_rng(1).random(np.shape(data[1])),)
    given = dataset(data, case.rows, case.batch, case.microbatches if backend == LOCAL else 1)
    # Fewer, to compile for fewer shapes.
    unseen = dataset(data, case.rows if case.truth == FIT else 2 * case.batch, case.batch)
    build = BUILD[case.model]
    if backend == FIT:
        return _fit(case, build(), given, unseen)
    stop = callbacks() if case.callbacks else []
    notes = NotesGradients() if case.gradients else Notes()
    with Trainer(overrides=words_of(case, backend)) as trainer:
        history = trainer.fit(
            build() if case.instance else build,
            given,
            validation_data=unseen,
            class_weight={0: 1.0, 1: 3.0, 2: 0.2} if case.class_weight else None,
            callbacks=[*stop, notes],
        )
        if save:
            trainer.save(save)
        more = {key: getattr(stop[0], key) for key in ("best", "best_epoch") if stop}
        return outcome_of(trainer, history, unseen, notes if case.truth == LOCAL else Notes(), more)


def _fit(case: Case, model: Any, given: Any, unseen: Any) -> Outcome:
    """What `Model.fit` makes of it."""
    import keras

    quiet = {"verbose": 0}
    history = model.fit(
        given, epochs=case.epochs, shuffle=False, validation_data=unseen, **quiet
    ).history
    variables = named(model)
    return Outcome(
        names=[name for name, _ in variables],
        held={name: v.numpy() for name, v in variables},
        history=history,
        evaluated=model.evaluate(unseen, return_dict=True, **quiet),
        predicted=keras.tree.flatten(model.predict(unseen, **quiet)),
    )


def named(model: Any) -> list[tuple[str, Any]]:
    """All variables of a model and its optimizer, with unique names."""
    variables = [*model.variables, *model.optimizer.variables]
    return [(f"{i}:{v.path}", v) for i, v in enumerate(variables)]


def outcome_of(trainer: Any, history: Any, data: Any, notes: Notes, more: Any) -> Outcome:
    """What a Trainer has after `fit`."""
    import keras

    from ktrainer.steps.variable_placement import placement_of

    model = trainer.model
    evaluated = trainer.evaluate(model, data)
    predicted = keras.tree.flatten(trainer.predict(model, data))
    placement = placement_of(model)
    variables = named(model)
    held = {n: v.numpy() for n, v in variables if placement is None or placement.holds(v)}
    return Outcome(
        names=[name for name, _ in variables],
        held=held,
        history=history.history,
        evaluated=evaluated,
        predicted=predicted,
        batches=notes.batches if placement is None or placement.replicas == 1 else [],
        gradients=notes.gradients,
        more=more,
    )


@functools.cache
def local(case: Case) -> Outcome:
    """The truth of a case, in one process; once a session."""
    return train(case, case.truth)


def pipeline(partitions: int, *words: str) -> tuple[str, ...]:
    """The words that choose the backend; microbatches are added by `same`."""
    return ("backend=pipeline", f"backend.partitions={partitions}", *words)


def same(
    expected: Outcome, ranks: list[Outcome], rtol: float = 1e-10, floor: float = 1e-13
) -> float:
    """Check every rank; returns the largest difference of a variable, relative to its largest
    element.

    Args:
        rtol: for variables, relative to their largest elements, logs and outputs.
        floor: what is zero but for round-off, as the gradient of a bias before BatchNorm.
    """
    held = [name for rank in ranks for name in rank.held]
    assert set(held) == set(expected.names)
    assert {name for rank in ranks for name in rank.gradients} == set(expected.gradients)
    worst = 0.0
    for at, rank in enumerate(ranks):
        assert rank.names == expected.names
        for name, value in rank.held.items():
            gap = _gap(f"rank {at}: {name}", value, expected.held[name], rtol, floor)
            worst = max(worst, gap)
        for name, value in rank.gradients.items():
            _gap(f"rank {at}: gradient of {name}", value, expected.gradients[name], rtol, floor)
        if rank.batches:
            assert rank.batches == ranks[0].batches
            _same_logs(rank.batches, expected.batches, rtol, floor)
        assert rank.history.keys() == expected.history.keys()
        for key, values in expected.history.items():
            np.testing.assert_allclose(rank.history[key], values, rtol, floor, err_msg=key)
        assert rank.evaluated.keys() == expected.evaluated.keys()
        for key, number in expected.evaluated.items():
            np.testing.assert_allclose(rank.evaluated[key], number, rtol, floor, err_msg=key)
        for mine, truth in zip(rank.predicted, expected.predicted, strict=True):
            np.testing.assert_allclose(mine, truth, rtol, rtol * np.abs(truth).max())
        for key, fact in expected.more.items():
            np.testing.assert_allclose(rank.more[key], fact, rtol, err_msg=key)
    copies_agree(ranks)
    return worst


def _gap(where: str, value: np.ndarray, truth: np.ndarray, rtol: float, floor: float) -> float:
    """The largest difference, relative to the largest element."""
    assert value.dtype == truth.dtype, where
    gap = np.abs(np.float64(value) - np.float64(truth)).max(initial=0.0)
    scale = np.abs(np.float64(truth)).max(initial=0.0)
    assert gap <= max(rtol * scale, floor), f"{where} differs by {gap:.1e} of {scale:.1e}"
    return float(gap / max(scale, 1e-3))


def _same_logs(ours: list[Any], expected: list[Any], rtol: float, floor: float) -> None:
    for mine, truth in zip(ours, expected, strict=True):
        assert mine.keys() == truth.keys()
        for key, number in truth.items():
            np.testing.assert_allclose(mine[key], number, rtol, floor, err_msg=key)


def copies_agree(ranks: list[Outcome]) -> None:
    """What several ranks hold has the same bits on all of them."""
    first: dict[str, bytes] = {}
    for rank in ranks:
        for name, value in rank.held.items():
            assert first.setdefault(name, value.tobytes()) == value.tobytes(), name
