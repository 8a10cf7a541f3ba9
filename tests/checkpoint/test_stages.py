"""Stages of a pipeline write one checkpoint together, and any number of them can go on from it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ktrainer.checkpoint.stage_parts as parts_module
from ktrainer import distributed
from ktrainer.checkpoint import resume, verify
from ktrainer.checkpoint.export.export_model import export_model
from ktrainer.checkpoint.format.checkpoint_reader import read_manifest
from ktrainer.errors import CheckpointError, ModelError
from ktrainer.steps.named_variables import all_variables
from ktrainer.steps.variable_placement import placement_of
from tests.checkpoint.stages import close, cut, keeper, same, values, whole_model

WHOLE = 0  # so many stages: not cut at all


def counted(model: Any) -> tuple[float, float]:
    """(total, count) of the metric of losses on this rank; nothing where none are computed."""
    placement = placement_of(model)
    if placement is not None and not placement.is_last:
        return 0.0, 0.0
    return float(model.metrics[0].total), float(model.metrics[0].count)


def _save(directory: str, partitions: int, steps: tuple[int, ...] = (3,)) -> Any:
    """Save; returns what the model was before it was cut, and what was counted."""
    model = whole_model(epochs=1)
    expected, rank = values(model), distributed.current_world().rank
    stop = keras.callbacks.EarlyStopping()
    if partitions:
        cut(model, partitions)
    stop.best_weights, stop.wait = model.get_weights(), 4
    model.reset_metrics()
    model.metrics[0].update_state(float(rank), sample_weight=1.0 + rank)
    callback = keeper(directory, model, [stop])
    for callback.progress.step in steps:
        assert callback.save({"loss": 1.0})
    callback.on_train_end()
    close(model)
    return expected, counted(model)


def _resume(directory: str, partitions: int) -> Any:
    """Go on with another model; returns what this rank has then."""
    here = distributed.current_world()
    model, stop = whole_model(seed=7, epochs=1), keras.callbacks.EarlyStopping()
    model.reset_metrics()
    if partitions:
        cut(model, partitions)
    path = directory if here.is_root else "/nowhere"
    progress = resume("auto", path, model=model, world=here, callbacks=[stop])
    assert progress is not None
    assert (progress.step, progress.batch, stop.wait) == (3, 2, 4)
    best = dict(zip([w.path for w in model.weights], stop.best_weights, strict=True))
    close(model)
    return values(model), best, counted(model)


# (ranks, stages) that save, and those that resume.
LAYOUTS = {
    (2, 2): [(1, WHOLE), (2, 2), (3, 3)],
    (4, 2): [(2, WHOLE), (4, 4)],
    (2, WHOLE): [(2, 2), (4, 2)],
}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "partitions"), LAYOUTS)
def test_any_number_of_stages_resumes(ranks, tmp_path, size: int, partitions: int) -> None:
    saved = ranks(size).run(_save, str(tmp_path), partitions)
    expected = saved[0][0]
    total, count = np.sum([one[1] for one in saved], axis=0)
    manifest = read_manifest(tmp_path / "step-00000003")
    assert list(manifest["arrays"])[: len(expected)] == list(expected)
    assert manifest["world_size"] == size
    files = [name for name in manifest["files"] if name not in ("state.json", "model.json")]
    assert (manifest["partitions"], manifest["replicas"]) == (
        partitions or 1,
        size // (partitions or 1),
    )
    parts = [f"arrays-p{p:02d}-00001.safetensors" for p in range(partitions)]
    assert files == (parts or ["arrays-00001.safetensors"])
    for other_size, other in LAYOUTS[size, partitions]:
        if other_size == 1:
            found = [_resume(str(tmp_path), other)]
        else:
            found = ranks(other_size).run(_resume, str(tmp_path), other, deadline=120)
        for mine, best, _ in found:
            same(mine, expected)
            for path, weight in best.items():
                assert (weight is None) == (f"model/{path}" not in mine)
            best = {f"model/{p}": w for p, w in best.items() if w is not None}
            same(best, expected)
        assert set().union(*(mine for mine, _, _ in found)) == set(expected)
        assert (sum(c[0] for _, _, c in found), sum(c[1] for _, _, c in found)) == (total, count)
    check_export(tmp_path / "step-00000003", expected)


def check_export(checkpoint: Path, expected: dict[str, np.ndarray]) -> None:
    """The Keras files of it have all weights, whichever stage wrote them, and the optimizer."""
    file = checkpoint.parent / "model.keras"
    export_model(checkpoint, file)
    loaded = keras.models.load_model(file)
    values = {name: np.array(variable.numpy()) for name, variable in all_variables(loaded)}
    found = {name: value for name, value in values.items() if "seed" not in name}
    same(found, expected)
    assert set(found) == {name for name in expected if "seed" not in name}  # as of Keras' own save
    file = checkpoint.parent / "model.weights.h5"
    export_model(checkpoint, file)
    other = whole_model(seed=7)
    other = keras.Model(other.inputs, other.outputs)  # without the optimizer
    other.load_weights(file)
    for weight in (w for w in other.weights if "seed" not in w.path):
        np.testing.assert_array_equal(weight.numpy(), expected[f"model/{weight.path}"])


def _damage(path: Path) -> None:
    content = path.read_bytes()
    at = len(content) - 5
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def _resume_quietly(directory: str, partitions: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _resume(directory, partitions)


def test_a_damaged_part_is_found(ranks, tmp_path) -> None:
    expected = ranks(2).run(_save, str(tmp_path), 2, (3, 4))[0][0]
    _damage(tmp_path / "step-00000004" / "arrays-p01-00001.safetensors")
    (problem,) = verify(tmp_path / "step-00000004")
    assert "arrays-p01-00001.safetensors: its content is damaged" in problem
    for mine, _, _ in ranks(2).run(_resume_quietly, str(tmp_path), 2):
        same(mine, expected)


def _resume_into_another_model(directory: str) -> None:
    model = whole_model(seed=1)
    extra = keras.layers.Dense(1, name="more")
    model = keras.Model(model.input, extra(model.output), name="net")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    before = values(model)
    cut_at_the_last(model)
    with pytest.raises(CheckpointError, match="model/more/kernel is not in") as raised:
        resume("auto", directory, model=model, world=distributed.current_world())
    assert "optimizer/0/" in str(raised.value)
    same(values(model), before)
    close(model)


def cut_at_the_last(model: Any) -> None:
    """As `cut`, for a model with one layer more."""
    model.get_layer("more").name = "last"
    cut(model, 2)


def test_all_of_the_model_must_fit(ranks, tmp_path) -> None:
    ranks(2).run(_save, str(tmp_path), 2)
    ranks(2).run(_resume_into_another_model, str(tmp_path))


def test_two_stages_must_not_save_the_same(tmp_path) -> None:
    def part(*names: str) -> dict[str, Any]:
        return {"error": None, "files": {}, "arrays": {name: {} for name in names}}

    message = "two stages have b; no stage has c; d is unexpected"
    with pytest.raises(CheckpointError, match=message):
        parts_module.merge_stage_parts(tmp_path, [part("a", "b"), part("b", "d")], ["a", "b", "c"])


def _export(path: str, partitions: int) -> Any:
    from ktrainer.checkpoint import save_model

    model = whole_model(epochs=1)
    expected = values(model)
    placement = cut(model, partitions)
    refused = Path(path).parent / "a file"
    if distributed.current_world().is_root:
        refused.write_text("")
    with pytest.raises(CheckpointError, match="cannot save the model"):
        save_model(model, refused / "m.keras", distributed.current_world())
    save_model(model, path, distributed.current_world())
    absent = [w for w in model.weights if not placement.holds(w)]
    assert absent
    for weight in absent:  # nothing stays behind
        with pytest.raises(ModelError, match="of the pipeline"):
            weight.numpy()
    close(model)
    return expected


@pytest.mark.quick("3-3")
@pytest.mark.parametrize(("size", "partitions"), [(3, 3), (4, 2)])
def test_the_whole_model_in_one_file(ranks, tmp_path, size: int, partitions: int) -> None:
    path = tmp_path / "model.keras"
    expected = ranks(size).run(_export, str(path), partitions, deadline=120)[0]
    loaded = keras.models.load_model(path)
    found = values(loaded)
    del found["seed/global"], expected["seed/global"]
    seeds = {name for name in expected if "seed_generator" in name}  # Keras does not save them
    assert set(found) == set(expected)
    same({k: v for k, v in found.items() if k not in seeds}, expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a file", "model.keras"]
