"""Losses of whole batches, as one process computes them: sums over examples, and with
`trainer.loss_scope=global` losses that couple examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pipeline.equal import pipeline, same
from tests.pipeline.whole import Fit, one_process, train

Ranks = Callable[..., Any]

GLOBAL = ("trainer.loss_scope=global",)
RECOMPUTE = ("backend.recompute=true",)


def check(ranks: Ranks, fit: Fit, size: int, *words: str) -> None:
    words = (*pipeline(2, "backend.microbatches=3"), *words)
    ours = ranks(size).run(train, fit, words, deadline=150)
    print(f"largest difference {same(one_process(fit), ours, rtol=1e-12):.1e}")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("fit", "size", "words"),
    [
        (Fit("simclr"), 2, ()),
        (Fit("clip"), 2, RECOMPUTE),
        (Fit("masked"), 2, ()),
        (Fit("two_losses"), 2, ()),
        (Fit("simclr"), 4, ("backend.placement=spread",)),
        (Fit("clip", rows=41), 4, ()),  # the last batch is one row: a replica without any
        (Fit("masked"), 4, ()),
        (Fit("two_losses", rows=41), 4, RECOMPUTE),
    ],
    ids=lambda v: v.model if isinstance(v, Fit) else None,
)
def test_losses_that_couple_examples(
    ranks: Ranks, fit: Fit, size: int, words: tuple[str, ...]
) -> None:
    check(ranks, fit, size, *GLOBAL, *words)


@pytest.mark.parametrize(
    ("fit", "size", "words"),
    [
        (Fit("adds"), 2, ("backend.schedule=zero_bubble",)),
        (Fit("vector"), 2, RECOMPUTE),
        (Fit("features"), 2, ()),
        (Fit("unreduced"), 2, ()),
        (Fit("adds"), 4, ()),
        (Fit("vector", rows=41), 4, ()),
        (Fit("adds", rows=41), 4, GLOBAL),
    ],
    ids=lambda v: v.model if isinstance(v, Fit) else None,
)
def test_losses_that_are_sums(ranks: Ranks, fit: Fit, size: int, words: tuple[str, ...]) -> None:
    check(ranks, fit, size, *words)
