"""A pipeline gives the numbers of one process: each kind of model, schedule, number of stages and
of replicas, precision, and loss, in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.small import group_mode
from tests.pipeline.equal import FIT, Case, Outcome, local, pipeline, same, train

Ranks = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

INTERLEAVED = ("backend.schedule=interleaved", "backend.chunks=2")
BACKWARD_FIRST = ("backend.schedule=interleaved",)
GPIPE = ("backend.schedule=gpipe",)
ZERO = ("backend.schedule=zero_bubble",)
RECOMPUTE = ("backend.recompute=true",)
SPREAD = ("backend.placement=spread",)
GLOBAL = ("trainer.loss_scope=global",)
HOROVOD = ("backend.engine=horovod",)
HALF = ("trainer.precision=mixed_float16",)


def check(
    ranks: Ranks, case: Case, stages: int, *words: str, replicas: int = 1, **close: float
) -> list[Outcome]:
    """Train `replicas` copies of `stages` stages, one a rank, and compare with one process."""
    words = (f"backend.microbatches={case.microbatches // replicas}", *words)
    group = ranks(stages * replicas, group_mode("horovod" if HOROVOD[0] in words else "mpi"))
    ours = group.run(train, case, pipeline(stages, *words), deadline=150)
    print(f"largest difference {same(local(case), ours, **close):.1e}")
    if replicas > 1 and stages > 1:
        copy, other = (1, stages) if SPREAD[0] in words else (stages, 1)
        assert ours[copy].held.keys() == ours[0].held.keys() != ours[other].held.keys()
    return ours


def name_of(value: Any) -> str | None:
    if isinstance(value, Case):
        return value.model
    if isinstance(value, tuple):
        return "-".join(word.partition("=")[2] for word in value) or "1f1b"
    return str(value) if isinstance(value, (str, int)) else None


MODELS = ("mlp", "cnn", "tied", "two", "recurrent")
MAIN = {name: Case(name, epochs=3 if name == "mlp" else 1, gradients=True) for name in MODELS}


@pytest.mark.quick("mlp-2-1f1b")
@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        ("mlp", 2, ()),
        ("cnn", 2, ZERO),
        ("tied", 2, GPIPE),
        ("two", 3, INTERLEAVED),
        ("recurrent", 2, RECOMPUTE),
        ("mlp", 4, BACKWARD_FIRST),
    ],
    ids=name_of,
)
def test_weights_gradients_logs_and_outputs(
    ranks: Ranks, model: str, stages: int, words: tuple[str, ...]
) -> None:
    check(ranks, MAIN[model], stages, *words)


SHORT = {"rows": 38, "epochs": 2}  # two updates an epoch
XLA = ("trainer.xla=true",)
CLIP = ("trainer.clip.global_norm=0.1",)
OPTIONS = {
    "clip": (Case("mlp", **SHORT, settings=CLIP), 2, ZERO),
    "sample-weight-instance-accumulate-clip-norm": (
        Case(
            "plain",
            **SHORT,
            weighted=True,
            instance=True,
            accumulate=2,
            settings=("trainer.clip.norm=0.02",),
        ),
        2,
        (),
    ),
    "few-rows-class-weight-patterns": (
        Case("plain", rows=42, epochs=2, class_weight=True),
        2,
        ("backend.stages={0: dense, 1: 'dense_[1-3]'}",),
    ),
    "callbacks": (Case("plain", rows=38, epochs=6, callbacks=True), 2, ()),
    "aside": (Case("aside", **SHORT), 3, ()),
    "unused": (Case("unused", **SHORT), 3, ZERO),
    "unbuilt": (Case("unbuilt", **SHORT, instance=True), 2, ()),
    # Its gradients are clipped on their way back, which health.verify would rightly name.
    "rare": (Case("rare", **SHORT, settings=("health.verify=off",)), 3, ZERO),
    "side-effects": (Case("aux", **SHORT), 2, ()),
    "three-holders": (Case("thrice", **SHORT), 3, ()),
    "complex": (Case("spectral", **SHORT), 2, ()),
    "nested-strings-profile": (Case("words", **SHORT), 2, ("backend.costs=profile",)),
    "clip-value-xla": (
        Case("plain", rows=20, epochs=2, settings=(*XLA, "trainer.clip.value=0.01")),
        2,
        (),
    ),
}


@pytest.mark.quick("clip")
@pytest.mark.parametrize(("case", "stages", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options(ranks: Ranks, case: Case, stages: int, words: tuple[str, ...]) -> None:
    check(ranks, case, stages, *words)


def test_stopping_early_takes_the_best_weights_back() -> None:
    """What `callbacks` promises of the case above holds in one process."""
    found = local(OPTIONS["callbacks"][0])
    assert found.more["best_epoch"] == 0
    assert found.history["learning_rate"] == [0.1, 0.1, 0.05]


REPLICATED = Case("mlp")
# The last batch is one row: the other copy has nothing to do.
LITTLE = Case("plain", rows=41, epochs=2, weighted=True)
MASKED = Case("masked", **SHORT, weighted=True, settings=("trainer.clip.global_norm=0.5",))


@pytest.mark.quick("mlp-2-2-1f1b")
@pytest.mark.parametrize(
    ("case", "stages", "replicas", "words"),
    [
        (REPLICATED, 2, 2, ()),
        (LITTLE, 2, 2, (*SPREAD, *GPIPE)),
        (MASKED, 2, 2, ZERO),
        # With several stages a process, they keep as little as can be, too.
        (Case("two", **SHORT, accumulate=2), 2, 2, (*SPREAD, *INTERLEAVED, *RECOMPUTE)),
        pytest.param(MASKED, 2, 2, (*SPREAD, *HOROVOD), marks=pytest.mark.horovod),
        (Case("plain", **SHORT, microbatches=6), 1, 3, ()),
    ],
    ids=name_of,
)
def test_replicas(
    ranks: Ranks, case: Case, stages: int, replicas: int, words: tuple[str, ...]
) -> None:
    check(ranks, case, stages, *words, replicas=replicas)


def whole(model: str, replicas: int = 1, rows: int = 43) -> Case:
    """A loss of whole batches, as `Model.fit` computes it; three microbatches a replica."""
    return Case(model, epochs=2, rows=rows, microbatches=3 * replicas, truth=FIT)


@pytest.mark.quick("simclr-2-global-spread")
@pytest.mark.parametrize(
    ("case", "replicas", "words"),
    [
        # They couple examples.
        (whole("simclr", 2), 2, (*GLOBAL, *SPREAD)),
        (whole("clip"), 1, (*GLOBAL, *RECOMPUTE)),
        (whole("weighted_tokens", 2), 2, GLOBAL),
        # The last batch: a replica without any.
        (whole("two_losses", 2, rows=41), 2, GLOBAL),
        # They are sums.
        (whole("adds", 2), 2, ZERO),
        (whole("adds", 2, rows=41), 2, GLOBAL),
        (whole("weighs"), 1, ()),
        (whole("leaves_out"), 1, ()),
        (whole("vector", 2, rows=41), 2, RECOMPUTE),
        (whole("features"), 1, ()),
        (whole("unreduced"), 1, ()),
    ],
    ids=name_of,
)
def test_losses_of_whole_batches(
    ranks: Ranks, case: Case, replicas: int, words: tuple[str, ...]
) -> None:
    check(ranks, case, 2, *words, replicas=replicas, rtol=1e-12)


@pytest.mark.exhaustive
def test_two_replicas_compute_what_is_gathered_already(ranks: Ranks) -> None:
    check(ranks, whole("gathers", 2), 1, *GLOBAL, replicas=2, rtol=1e-12)


@pytest.mark.exhaustive
def test_float32_is_equal_to_round_off(ranks: Ranks) -> None:
    check(ranks, Case("plain", epochs=3, floatx="float32"), 2, rtol=5e-6, floor=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "stages", "words", "precision"),
    [
        ("cnn", 2, ZERO, "mixed_bfloat16"),
        ("tied", 2, (), "mixed_bfloat16"),
        ("aside", 3, (), "mixed_float16"),
    ],
    ids=name_of,
)
def test_mixed_precision_rounds_as_one_process_does(
    ranks: Ranks, model: str, stages: int, words: tuple[str, ...], precision: str
) -> None:
    """What is computed in 16 bits has the same bits as in one process, since every stage computes
    with the shapes and types of the whole; what remains is the order of sums in float32."""
    case = Case(model, **SHORT, floatx="float32", settings=(f"trainer.precision={precision}",))
    check(ranks, case, stages, *words, rtol=2e-6, floor=1e-8)


@pytest.mark.exhaustive
def test_an_overflow_on_the_first_stage_is_skipped_on_all(ranks: Ranks) -> None:
    """Only one stage's gradients overflow, in all of the first three updates."""
    case = Case("steep_first", floatx="float32", settings=(*HALF, "trainer.max_steps=3"))
    for fact in _facts(check(ranks, case, 3, rtol=2e-6, floor=0.0)):
        assert (fact["dynamic_scale"], fact["iteration"]) == (2**12, 0)


@pytest.mark.exhaustive
def test_a_common_loss_scale_falls_until_nothing_overflows(ranks: Ranks) -> None:
    """On the last stage alone, whose overflows all others skip."""
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
