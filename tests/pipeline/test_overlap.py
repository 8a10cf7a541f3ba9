"""Overlap of transfers and computation, shown by order and not by time: a stage waits for what
another stage could not do if it had to wait itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
    from ktrainer import distributed

    original = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        here = distributed.current_world()
        assert name != "reduce_in_place" or any(array.size for array in args[1])
        (folder / f"{here.rank}-{here.step}").touch()
        return original(*args, **kwargs)

    with patch.object(owner, name, marked):
        yield


def wait_for(files: Sequence[Path], why: str) -> None:
    end = time.monotonic() + SECONDS
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, why
        time.sleep(0.001)


@contextmanager
def last_backward_waits_for(ranks: tuple[int, ...], folder: Path) -> Iterator[None]:
    """The last backward pass of a step ends once these ranks have left their files."""
    from ktrainer import distributed
    from ktrainer.backends.pipeline.runtime.runner import _Step

    original = _Step.backward

    def backward(step: Any, action: Any) -> None:
        original(step, action)
        if action.microbatch == len(step.microbatches) - 1:
            here = distributed.current_world()
            files = [folder / f"{rank}-{here.step}" for rank in ranks]
            wait_for(files, f"nothing from {ranks} during the last backward pass")

    with patch.object(_Step, "backward", backward):
        yield


def _reducing(case: Case, words: tuple[str, ...], folder: str) -> Outcome:
    from ktrainer import distributed
    from ktrainer.distributed.mpi_gradients import MpiGradients

    if distributed.current_world().rank in (1, 3):  # the last stage of each copy
        with marking(MpiGradients, "reduce_in_place", Path(folder)):
            return train(case, words)
    with last_backward_waits_for((1, 3), Path(folder)):
        return train(case, words)


@pytest.mark.exhaustive
def test_copies_sum_gradients_while_stages_before_them_are_at_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Also where weights are tied, of which one part is on the first stage."""
    words = pipeline(2, "backend.microbatches=2", "backend.schedule=gpipe")
    case = Case("masked", rows=38, epochs=1)
    copies_agree(ranks(4).run(_reducing, case, words, str(tmp_path), deadline=150))
    assert len(list(tmp_path.iterdir())) == 2 * 2  # both ranks, in both steps


def _sharing(case: Case, words: tuple[str, ...], folder: str) -> Outcome:
    from ktrainer import distributed
    from ktrainer.backends.pipeline.runtime.transport import Transport

    if distributed.current_world().rank == 1:
        with marking(Transport, "start_send", Path(folder)):
            return train(case, words)
    with last_backward_waits_for((1,), Path(folder)):
        return train(case, words)


@pytest.mark.exhaustive
def test_gradients_of_tied_weights_leave_while_stages_before_are_at_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    words = pipeline(2, "backend.microbatches=4")
    case = Case("tied", rows=38, epochs=1)
    ranks(2).run(_sharing, case, words, str(tmp_path), deadline=150)
    assert len(list(tmp_path.iterdir())) == 2


def _transferring(folder: str) -> list[str]:
    """What this rank does in the second step, in order: computations, and posted receives."""
    import keras
    import numpy as np

    from ktrainer import Trainer, distributed
    from ktrainer.backends.pipeline.runtime.runner import _Step
    from ktrainer.backends.pipeline.runtime.transport import Transport

    seen: list[str] = []
    post_receive, forward, backward = Transport.post_receive, _Step.forward, _Step.backward
    last = Path(folder) / "runs ahead"

    def posted(transport: Any, transfer: Any, specs: Any) -> None:
        here = distributed.current_world()
        if here.step and (here.rank, transfer.microbatch) == (1, 0):
            # Nothing is received before the first stage computes on the second microbatch.
            wait_for([last], "the first stage waits until what it sends is received")
        if here.step:
            seen.append(str(transfer))
        post_receive(transport, transfer, specs)

    def runs(step: Any, action: Any, original: Any) -> None:
        here = distributed.current_world()
        if here.step:
            seen.append(str(action))
        if here.step and (here.rank, action.microbatch) == (0, 1):
            last.touch()
        original(step, action)

    def build() -> Any:
        dense = [keras.layers.Dense(4096, name="a"), keras.layers.Dense(4, name="b")]
        model = keras.Sequential([keras.Input((4,)), *dense])
        model.compile("sgd", "mse")
        return model

    words = [*pipeline(2, "backend.microbatches=4", "backend.stages={0: a, 1: b}")]
    quiet = ("data.batch_size=64", "logging.progress=none", "logging.csv=false")
    x = np.zeros((128, 4), "float32")
    with (
        patch.object(Transport, "post_receive", posted),
        patch.object(_Step, "forward", lambda step, action: runs(step, action, forward)),
        patch.object(_Step, "backward", lambda step, action: runs(step, action, backward)),
        Trainer(overrides=[*words, *quiet]) as trainer,
    ):
        trainer.fit(build, (x, x))
    return seen


def test_stages_compute_while_tensors_travel(ranks: Ranks, tmp_path: Path) -> None:
    """What is sent is not waited for, though its 256 kB go only once they are asked for; and what
    comes has somewhere to go while the stage computes what comes before it."""
    first, second = ranks(2).run(_transferring, str(tmp_path), deadline=150)
    for microbatch in range(1, 4):
        room = second.index(f"activation 0->1 of microbatch {microbatch}")
        assert room < second.index(f"1F{microbatch - 1}")
        room = first.index(f"gradient 1->0 of microbatch {microbatch}")
        assert room < first.index(f"0B{microbatch - 1}")


def _telling(case: Case, words: tuple[str, ...]) -> int:
    from ktrainer.backends.pipeline.runtime.transport import Transport

    told = []
    original = Transport.send_object

    def send_object(*args: Any) -> None:
        told.append(args)
        original(*args)

    with patch.object(Transport, "send_object", send_object):
        train(case, words)
    return len(told)


def test_shapes_are_agreed_once(ranks: Ranks) -> None:
    """In three epochs of equal microbatches: for training, validation and prediction the first
    stage says what comes, and the last one once what is wanted back."""
    words = pipeline(2, "backend.microbatches=4")
    assert ranks(2).run(_telling, Case("plain", rows=40, epochs=3), words) == [3, 1]
