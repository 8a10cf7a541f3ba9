"""`trainer.loss_scope=global`: losses that couple examples, as one process computes them."""

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
    words = (*pipeline(2, "backend.microbatches=3"), *GLOBAL, *words)
    ours = ranks(size).run(train, fit, words, deadline=150)
    print(f"largest difference {same(one_process(fit), ours, rtol=1e-12):.1e}")


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
def test_as_one_process(ranks: Ranks, fit: Fit, size: int, words: tuple[str, ...]) -> None:
    check(ranks, fit, size, *words)
