"""What goes on while other stages are still at their backward passes, shown by order and not by
time: a stage does not end its own last backward pass before the others have begun theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.pipeline.equal import Case, Outcome, copies_agree, pipeline, train

SECONDS = 20.0  # how long a stage waits for what shall happen meanwhile
Ranks = Callable[..., Any]


@contextmanager
def marking(owner: Any, name: str, folder: Path) -> Iterator[None]:
    """Leave a file, named by rank and step, before the function is called."""
    from ktrainer import world

    original = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        here = world.current()
        (folder / f"{here.rank}-{here.step}").touch()
        return original(*args, **kwargs)

    with patch.object(owner, name, marked):
        yield


@contextmanager
def last_backward_waits_for(ranks: tuple[int, ...], folder: Path) -> Iterator[None]:
    """The last backward pass of a step ends once these ranks have left their files."""
    from ktrainer import world
    from ktrainer.backends.pipeline.runner import _Step

    original = _Step.backward

    def backward(step: Any, action: Any) -> None:
        original(step, action)
        if action.microbatch == len(step.microbatches) - 1:
            here = world.current()
            files = [folder / f"{rank}-{here.step}" for rank in ranks]
            end = time.monotonic() + SECONDS
            while not all(file.exists() for file in files):
                assert time.monotonic() < end, f"nothing from {ranks} during the last backward pass"
                time.sleep(0.001)

    with patch.object(_Step, "backward", backward):
        yield


def _reducing(case: Case, words: tuple[str, ...], folder: str) -> Outcome:
    from ktrainer import world
    from ktrainer.world.plane_mpi import MpiPlane

    if world.current().rank in (1, 3):  # the last stage of each copy
        with marking(MpiPlane, "reduce_in_place", Path(folder)):
            return train(case, words)
    with last_backward_waits_for((1, 3), Path(folder)):
        return train(case, words)


@pytest.mark.parametrize(("model", "schedule"), [("plain", "1f1b"), ("masked", "gpipe")])
def test_copies_sum_gradients_while_stages_before_them_are_at_work(
    ranks: Ranks, tmp_path: Path, model: str, schedule: str
) -> None:
    """Also where weights are tied, of which one part is on the first stage."""
    words = pipeline(2, "backend.microbatches=2", f"backend.schedule={schedule}")
    case = Case(model, rows=38, epochs=1)
    copies_agree(ranks(4).run(_reducing, case, words, str(tmp_path), deadline=150))
    assert len(list(tmp_path.iterdir())) == 2 * 2  # both ranks, in both steps


def _sharing(case: Case, words: tuple[str, ...], folder: str) -> Outcome:
    from ktrainer import world
    from ktrainer.backends.pipeline.post import Post

    if world.current().rank == 1:
        with marking(Post, "start_send", Path(folder)):
            return train(case, words)
    with last_backward_waits_for((1,), Path(folder)):
        return train(case, words)


def test_gradients_of_tied_weights_leave_while_stages_before_are_at_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    words = pipeline(2, "backend.microbatches=4")
    case = Case("tied", rows=38, epochs=1)
    ranks(2).run(_sharing, case, words, str(tmp_path), deadline=150)
    assert len(list(tmp_path.iterdir())) == 2
