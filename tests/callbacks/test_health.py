"""All ranks stop at the step in which any of them went wrong."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from ktrainer.callbacks import Audit, BroadcastVariables, Callback, LossGuard
from ktrainer.distributed import SingleWorld
from ktrainer.errors import DivergenceError
from ktrainer.state.nested_logs import losses_are_finite
from tests.callbacks.helpers import EachStep, data, fit, small_model


class SpoilsAt(Callback):
    """Makes a weight NaN before the update that follows `step` updates, on one rank."""

    def __init__(self, step: int, rank: int = 0, value: float = math.nan) -> None:
        super().__init__()
        self.step, self.rank, self.value = step, rank, value

    def on_step_begin(self, step: int) -> None:
        if step == self.step and self.world.rank == self.rank:
            weight = self.model.trainable_weights[0]
            weight.assign(weight * 0 + self.value)


def test_stops_at_that_step() -> None:
    stop, seen = LossGuard(), EachStep(lambda model: None)
    with pytest.warns(UserWarning, match="not finite at step 3"):
        fit(small_model(), [SpoilsAt(2), stop, seen], epochs=3)
    assert stop.stopped_at == len(seen.seen) == 3
    fit(small_model(), [stop, seen])
    assert stop.stopped_at is None


def _stop_together() -> tuple[int | None, int, list[str]]:
    stop, seen = LossGuard(), EachStep(lambda model: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(small_model(), [SpoilsAt(6, rank=1), stop, seen], epochs=3)
    return stop.stopped_at, len(seen.seen), [str(w.message) for w in caught]


def test_one_rank_stops_all(ranks) -> None:
    first, second = ranks(2).run(_stop_together)
    assert first[:2] == second[:2] == (7, 7)
    assert "on rank 1 ({'loss': nan" in first[2][0]
    assert second[2] == []


@pytest.mark.parametrize(("heals", "where"), [(False, "at step 4"), (True, "by step 4")])
def test_a_call_of_several_updates_on_a_rank_that_is_left_alone(heals: bool, where: str) -> None:
    """Ends at the first bad loss in one process; not where others may join."""

    class World(SingleWorld):
        pass

    World.heals = heals
    guard = LossGuard(world=World())
    guard.set_model(small_model())
    guard.on_train_begin()
    guard.progress.step = 4
    with pytest.warns(UserWarning, match=f"not finite {where} "):
        guard.on_step_end(4, {"loss": math.nan})


def test_the_end_of_a_step_that_comes_again_stops_again() -> None:
    """As where a rank was lost at the step at which all of them stop."""
    guard = LossGuard()
    guard.set_model(small_model())
    guard.on_train_begin()
    state = guard.state_dict()
    for _ in range(2):
        guard.load_state_dict(state)
        guard.progress.step = 3
        guard.on_restore(guard.progress)
        guard.model.stop_training, guard.progress.step = False, 4
        with pytest.warns(UserWarning, match="not finite at step 4"):
            guard.on_step_end(4, {"loss": math.nan})
        assert guard.model.stop_training


def test_the_loss_can_be_looked_at_less_often() -> None:
    stop = LossGuard(every=5)
    with pytest.warns(UserWarning, match="not finite by step 5"):
        fit(small_model(), [SpoilsAt(2), stop], epochs=3)
    assert stop.stopped_at == 5


def test_which_values_count() -> None:
    assert losses_are_finite({"loss": 1.0, "accuracy": math.nan, "val_loss": math.inf})
    assert not losses_are_finite({"d_loss": 1.0, "g_loss": np.float32("nan")})
    assert not losses_are_finite({"score": math.inf})
    assert losses_are_finite(None)


def _audit(drift: bool) -> None:
    callbacks: list[Any] = [BroadcastVariables(), Audit(every="2ba")]
    model = small_model()
    if drift:
        callbacks.append(SpoilsAt(2, rank=1, value=0.5))
    x, y = data()
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=callbacks)


def test_audit_names_what_differs(ranks) -> None:
    ranks(2).run(_audit, False)
    for outcome in ranks(2).outcomes(_audit, True):
        assert isinstance(outcome.error, DivergenceError)
        assert "model/sequential/dense/kernel" in str(outcome.error)
