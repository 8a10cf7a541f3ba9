"""A model and a configuration give stages and schedules, the same on every rank."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import ktrainer
from ktrainer.backends.pipeline.planning import (
    StagePlan,
    activations_by_stage,
    plan_stages,
    recomputed_by_stage,
)
from ktrainer.backends.pipeline.schedules.actions import live_activations
from ktrainer.backends.pipeline.schedules.make_schedule import SCHEDULES, make_schedule
from ktrainer.config import load_config
from ktrainer.errors import ConfigError, ModelError
from tests.pipeline import models

_TOKENS = tf.TensorSpec((None, 6), "int32")
_MODELS = {
    "cnn": (models.residual_cnn, None),
    "two": (models.two_in_two_out, None),
    "nested": (models.nested, None),
    "shared": (models.shared_layer, None),
    "tied": (models.Tied, _TOKENS),
}


def _plan(model: Any, *words: str, spec: Any = None, **rest: Any) -> StagePlan:
    config = load_config(None, ["backend=pipeline", "backend.partitions=2", *words]).backend
    settings = {"microbatches": 4, "batch": 2, "state_factor": 4.0, **rest}
    return plan_stages(model, spec, config, **settings)


def _stack(count: int = 8, width: int = 16) -> keras.Model:
    names = [layers.Dense(width, name=f"dense_{i}") for i in range(count)]
    return keras.Sequential([keras.Input((width,)), *names])


def _valueless(make: Any) -> Any:
    with keras.StatelessScope(initialize_variables=False):
        return make()


def test_equal_layers_are_dealt_out_evenly() -> None:
    made = _plan(_stack(), "backend.partitions=4")
    assert [len(stage.nodes) for stage in made.assignment.stages] == [2, 2, 2, 2]
    assert made.stage_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert (made.schedule.name, made.schedule.ranks, made.schedule.microbatches) == ("1f1b", 4, 4)
    assert len(made.costs) == len(made.graph.nodes) == 8


def test_chunks_are_stages_of_their_own() -> None:
    words = ["backend.schedule=interleaved", "backend.chunks=2", "backend.microbatches=4"]
    made = _plan(_stack(), *words)
    assert made.stage_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert made.schedule.stages == 4


def test_memory_counts_the_activations_of_the_schedule() -> None:
    first = {
        name: _plan(_stack(), f"backend.schedule={name}").assignment.stages[0].memory
        for name in ("1f1b", "gpipe")
    }
    # Four dense layers: 16 floats each for two examples, of 4 microbatches in place of 2.
    assert first["gpipe"] - first["1f1b"] == 2 * 4 * 16 * 2 * 4


def test_memory_with_recomputation_counts_what_is_received_and_one_microbatch() -> None:
    words = ["backend.schedule=gpipe", "backend.recompute=true"]
    kept, again = (_plan(_stack(), *words[:n]).assignment.stages for n in (1, 2))
    one = 4 * 16 * 2 * 4  # what four layers make of a microbatch
    assert [x.memory - y.memory for x, y in zip(kept, again, strict=True)] == [3 * one, 3 * one]
    with pytest.raises(ConfigError, match="The least that does is"):
        _plan(_stack(), words[0], f"backend.memory_limit={again[1].memory}")
    assert _plan(_stack(), *words, f"backend.memory_limit={again[1].memory}").stage_of


def test_recomputed_activations_wait_for_late_gradients_of_weights() -> None:
    assert recomputed_by_stage(make_schedule("1f1b", 3, 7)) == (1, 1, 1)
    assert recomputed_by_stage(make_schedule("zero_bubble", 3, 7)) == (1, 2, 3)


def test_all_microbatches_of_an_update_are_planned_for() -> None:
    words = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=4"]
    gpipe = [*words, "backend.schedule=gpipe", "backend.active_microbatches=4"]
    load_config(None, gpipe)
    with pytest.raises(ConfigError, match="all 8 microbatches of an update") as caught:
        load_config(None, [*gpipe, "trainer.accumulate=2"])
    assert caught.value.path == "backend.active_microbatches"


def test_strings_stay_on_their_stage() -> None:
    inputs = keras.Input((4,), dtype="string")
    words = layers.Identity(dtype="string", name="words")(inputs)
    numbers = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot", name="look")(words)
    model = keras.Model(inputs, layers.Dense(3, name="head")(numbers))
    made = _plan(model, "backend.stages={0: words|look, 1: head}")
    assert [stage.sends != () for stage in made.cut(made.graph)] == [True, False]
    made = _plan(model, "backend.stages={0: words, 1: look|head}")
    with pytest.raises(ModelError, match="'words' makes strings"):
        made.cut(made.graph)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
def test_activations_of_a_rank_are_those_of_its_stage(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    assert activations_by_stage(schedule) == live_activations(schedule)
    assert name in SCHEDULES


def test_activations_of_several_stages_on_a_rank() -> None:
    schedule = make_schedule("interleaved", 2, 6, 3)
    by_stage, by_rank = activations_by_stage(schedule), live_activations(schedule)
    for rank in range(2):
        assert max(by_stage[rank::2]) <= by_rank[rank] <= sum(by_stage[rank::2])
    assert activations_by_stage(make_schedule("forward_only", 2, 6)) == (1, 1)


def test_patterns() -> None:
    words = ["backend.stages={0: 'dense_0', 1: 'dense_[1-7]'}"]
    assert _plan(_stack(), *words).stage_of == (0, 1, 1, 1, 1, 1, 1, 1)
    words = ["backend.stages={0: 'dense_0'}", "backend.default_partition=1"]
    assert _plan(_stack(), *words).stage_of == (0, 1, 1, 1, 1, 1, 1, 1)


def test_scopes() -> None:
    x = inputs = keras.Input((4,))
    for index in (0, 1, 1):
        with ktrainer.partition(index):
            x = layers.Dense(4)(x)
    model = keras.Model(inputs, x)
    assert _plan(model).stage_of == (0, 1, 1)
    with pytest.raises(ConfigError, match=r"backend.partitions: .*set it to 2"):
        _plan(model, "backend.partitions=1")
    with pytest.raises(ConfigError, match="stage 0 has no layers"):
        _plan(_stack(), "backend.default_partition=1")


def test_limits_are_kept_or_refused() -> None:
    with pytest.raises(ConfigError, match="The least that does is") as caught:
        _plan(_stack(), "backend.memory_limit=1KB")
    assert caught.value.path == "backend.memory_limit"
    assert _plan(_stack(), "backend.memory_limit=1MB").assignment.stages[0].memory < 10**6
    with pytest.raises(ConfigError, match="cannot be cut into 9 stages") as caught:
        _plan(_stack(), "backend.partitions=9")
    assert caught.value.path == "backend.partitions"


@pytest.mark.quick("nested")
@pytest.mark.parametrize("name", _MODELS)
def test_a_model_without_values(name: str) -> None:
    make, spec = _MODELS[name]
    model = _valueless(make)
    made, expected = _plan(model, spec=spec), _plan(make(), spec=spec)
    assert (made.stage_of, made.costs) == (expected.stage_of, expected.costs)
    assert [s.bytes for s in made.assignment.stages] == [
        s.bytes for s in expected.assignment.stages
    ]
    assert model.variables
    assert all(v._value is None for v in model.variables)


def test_a_profile_of_a_model_without_values() -> None:
    model = _valueless(models.residual_cnn)
    made = _plan(model, "backend.costs=profile")
    assert all(seconds > 0 for seconds in made.costs)
    assert all(v._value is None for v in model.variables)


def test_costs_from_another_rank() -> None:
    costs = [7.0, *[1.0] * 7]
    made = _plan(_stack(), "backend.costs=profile", "backend.memory_weight=0", costs=costs)
    assert made.costs == tuple(costs)
    assert made.stage_of == (0, 1, 1, 1, 1, 1, 1, 1)


def test_the_graph_for_inference() -> None:
    made = _plan(models.residual_cnn(), training=False)
    assert not made.graph.training
