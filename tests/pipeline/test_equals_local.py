"""A pipeline gives the numbers of one process: every kind of model, schedule, number of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.small import more
from tests.pipeline.equal import Case, Outcome, local, pipeline, same, train

Ranks = Callable[..., Any]

INTERLEAVED = ("backend.schedule=interleaved", "backend.chunks=2")
BACKWARD_FIRST = ("backend.schedule=interleaved",)
GPIPE = ("backend.schedule=gpipe",)
ZERO = ("backend.schedule=zero_bubble",)
RECOMPUTE = ("backend.recompute=true",)
MODELS = ("mlp", "cnn", "tied", "two", "recurrent")
MAIN = {name: Case(name, epochs=3, gradients=True) for name in MODELS}


def check(ranks: Ranks, case: Case, stages: int, *words: str, **close: float) -> list[Outcome]:
    """Train in `stages` stages, one a rank, and compare with one process."""
    words = (f"backend.microbatches={case.microbatches}", *words)
    ours = ranks(stages).run(train, case, pipeline(stages, *words), deadline=150)
    print(f"largest difference {same(local(case), ours, **close):.1e}")
    return ours


@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        ("mlp", 2, ()),
        ("cnn", 2, ZERO),
        ("tied", 2, INTERLEAVED),
        ("two", 2, GPIPE),
        ("recurrent", 2, RECOMPUTE),
        more("mlp", 2, GPIPE),
        more("cnn", 2, INTERLEAVED),
        more("tied", 2, GPIPE),
        more("two", 2, ()),
        more("two", 2, ZERO),
        more("recurrent", 2, INTERLEAVED),
        ("mlp", 3, ZERO),
        more("cnn", 3, GPIPE),
        more("tied", 3, ()),
        more("two", 3, INTERLEAVED),
        more("recurrent", 3, ZERO),
        more("mlp", 4, INTERLEAVED),
        ("cnn", 4, ()),
        ("tied", 4, ZERO),
        ("two", 4, (*GPIPE, *RECOMPUTE)),
        more("recurrent", 4, BACKWARD_FIRST),
    ],
    ids=lambda v: "-".join(w.partition("=")[2] for w in v) or "1f1b" if isinstance(v, tuple) else v,
)
def test_weights_gradients_logs_and_outputs(
    ranks: Ranks, model: str, stages: int, words: tuple[str, ...]
) -> None:
    check(ranks, MAIN[model], stages, *words)


SHORT = {"rows": 38, "epochs": 2}  # two updates an epoch
XLA = ("trainer.xla=true",)
CLIP = ("trainer.clip.global_norm=0.1",)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("case", "stages", "words"),
    [
        (Case("mlp", **SHORT, accumulate=2), 2, ()),
        (Case("mlp", **SHORT, settings=CLIP), 2, ZERO),
        (Case("plain", **SHORT, weighted=True, instance=True), 2, ()),
        (Case("plain", rows=42, epochs=2, class_weight=True), 2, ()),
        (Case("scoped", **SHORT, settings=CLIP), 2, ()),
        (Case("plain", **SHORT), 2, ("backend.stages={0: dense, 1: 'dense_[1-3]'}",)),
        (Case("plain", rows=38, epochs=6, callbacks=True), 2, ()),
        (Case("aside", **SHORT), 3, ()),
        (Case("unused", **SHORT), 3, ZERO),
        # Its gradients are clipped on their way back, which health.verify would rightly name.
        (Case("rare", **SHORT, settings=("health.verify=off",)), 3, ZERO),
        (Case("thrice", **SHORT), 3, ()),
        (Case("words", **SHORT), 2, ("backend.costs=profile",)),
        (Case("masked", **SHORT, weighted=True, settings=("trainer.clip.norm=0.02",)), 2, ()),
        (Case("plain", rows=20, epochs=2, settings=(*XLA, "trainer.clip.value=0.01")), 2, ()),
    ],
    ids=[
        "accumulate",
        "clip",
        "sample-weight-instance",
        "few-rows-class-weight",
        "scope",
        "patterns",
        "callbacks",
        "aside",
        "unused",
        "rare",
        "three-holders",
        "nested-strings-profile",
        "masks-and-weights-clip-norm",
        "clip-value-xla",
    ],
)
def test_options(ranks: Ranks, case: Case, stages: int, words: tuple[str, ...]) -> None:
    check(ranks, case, stages, *words)


def test_stopping_early_takes_the_best_weights_back() -> None:
    """What `callbacks` promises of the case above holds in one process."""
    found = local(Case("plain", rows=38, epochs=6, callbacks=True))
    assert found.more["best_epoch"] == 0
    assert found.history["learning_rate"] == [0.1, 0.1, 0.05]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("plain", epochs=3, floatx="float32"), ()),
        more(Case("cnn", **SHORT, floatx="float32"), ZERO),
        more(Case("masked", **SHORT, floatx="float32"), ()),
    ],
    ids=["plain", "cnn", "masked"],
)
def test_float32_is_equal_to_round_off(ranks: Ranks, case: Case, words: tuple[str, ...]) -> None:
    check(ranks, case, 2, *words, rtol=5e-6, floor=1e-6)


@pytest.mark.parametrize(
    ("model", "stages", "words", "precision"),
    [
        more("plain", 2, ZERO, "mixed_bfloat16"),
        more("cnn", 3, ZERO, "mixed_bfloat16"),
        ("tied", 2, ZERO, "mixed_bfloat16"),
        more("plain", 2, ZERO, "mixed_float16"),
        more("cnn", 2, (), "mixed_float16"),
        more("tied", 3, GPIPE, "mixed_float16"),
        ("aside", 3, (), "mixed_float16"),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_mixed_precision_rounds_as_one_process_does(
    ranks: Ranks, model: str, stages: int, words: tuple[str, ...], precision: str
) -> None:
    """What is computed in 16 bits has the same bits as in one process, since every stage computes
    with the shapes and types of the whole; what remains is the order of sums in float32."""
    case = Case(model, **SHORT, floatx="float32", settings=(f"trainer.precision={precision}",))
    check(ranks, case, stages, *words, rtol=2e-6, floor=1e-8)


HALF = ("trainer.precision=mixed_float16",)


@pytest.mark.parametrize("model", ["steep", "steep_first"])
def test_an_overflow_on_one_stage_is_skipped_on_all(ranks: Ranks, model: str) -> None:
    """Only one stage's gradients overflow, in all of the first three updates."""
    case = Case(model, floatx="float32", settings=(*HALF, "trainer.max_steps=3"))
    for fact in _facts(check(ranks, case, 3, rtol=2e-6, floor=0.0)):
        assert (fact["dynamic_scale"], fact["iteration"]) == (2**12, 0)


def test_a_common_loss_scale_falls_until_nothing_overflows(ranks: Ranks) -> None:
    case = Case("steep", floatx="float32", settings=HALF)
    ours = check(ranks, case, 3, rtol=2e-6, floor=1e-8)
    (alone,) = _facts([local(case)])
    assert alone["dynamic_scale"] == 2.0 ** (15 - (17 - alone["iteration"]))
    assert 5 < alone["iteration"] < 17
    assert _facts(ours) == [alone] * 3


def _facts(ranks: list[Outcome]) -> list[dict[str, float]]:
    """On each rank what the optimizer counts: the loss scale, and the updates that it made."""
    wanted = ("dynamic_scale", "iteration", "step_counter")
    ends = [{name.split("/")[-1]: v for name, v in rank.held.items()} for rank in ranks]
    return [{key: float(end[key]) for key in wanted} for end in ends]
