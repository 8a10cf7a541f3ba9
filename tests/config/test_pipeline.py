"""The pipeline's keys: read from words and files, and refused before anything starts."""

from __future__ import annotations

import pytest

from ktrainer.config import load_config
from ktrainer.config.pipeline_checks import effective_pipeline, memory_limit, stage_patterns
from ktrainer.errors import ConfigError

PIPELINE = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=4"]


def backend(*words):
    return load_config(None, [*PIPELINE, *words]).backend


def test_defaults():
    made = load_config(None, ["backend=pipeline", "backend.partitions=3"]).backend
    assert (made.partitions, made.microbatches, made.schedule, made.chunks) == (3, 1, "1f1b", 1)
    assert (made.stages, memory_limit(made)) == ({}, None)


@pytest.mark.parametrize(
    "given, size",
    [
        ("2000000000", 2_000_000_000),
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("300MB", 300_000_000),
        ("64K", 64_000),
        ("1Ti", 2**40),
        ("12B", 12),
    ],
)
def test_sizes(given, size):
    made = backend(f"backend.memory_limit={given}")
    assert memory_limit(made) == size


@pytest.mark.parametrize("given", ["much", "-1", "0", "2iB", "2XB", "true", "0.1", "''"])
def test_what_is_no_size(given):
    with pytest.raises(ConfigError, match=r'no size: give bytes, .* "2GB"') as caught:
        backend(f"backend.memory_limit={given}")
    assert caught.value.path == "backend.memory_limit"


def test_stages_by_number(tmp_path):
    made = {0: "embed|block_[0-5]", 1: "block_.*|head"}
    file = tmp_path / "run.yaml"
    file.write_text(
        "backend:\n  name: pipeline\n  partitions: 2\n"
        "  stages:\n    0: embed|block_[0-5]\n    1: block_.*|head\n"
    )
    assert stage_patterns(load_config(file).backend) == made
    assert stage_patterns(backend("backend.stages={0: 'embed|block_[0-5]', 1: block_.*|head}")) == (
        made
    )
    words = ["backend.stages.0=embed|block_[0-5]", "backend.stages.1=block_.*|head"]
    assert stage_patterns(backend(*words)) == made
    config = {"backend": {"name": "pipeline", "partitions": 2, "stages": made}}
    assert stage_patterns(load_config(config).backend) == made


@pytest.mark.parametrize(
    "words, path, says",
    [
        (["trainer.steps_per_call=4"], "trainer.steps_per_call", "set it to 1"),
        (["backend.chunks=2"], "backend.chunks", "backend.schedule=interleaved"),
        (["backend.schedule=zero_bubble", "backend.chunks=2"], "backend.chunks", "interleaved"),
        (
            ["backend.schedule=gpipe", "backend.active_microbatches=3"],
            "backend.active_microbatches",
            "use 4 or more, or backend.schedule=1f1b",
        ),
        (["backend.schedule=simple"], "backend.schedule", "backend.schedule=gpipe"),
        (["backend.schedule=interleave"], "backend.schedule", "Did you mean 'interleaved'"),
        (["backend.memory_weight=1.5"], "backend.memory_weight", "at most 1"),
        (["backend.partitions=0"], "backend.partitions", "at least 1"),
        (["backend.stages={0: a, 2: b}"], "backend.stages.2", "stage 2.* from 0 to 1"),
        (["backend.stages={-1: a, 0: b}"], "backend.stages.-1", "from 0 to 1"),
        (["backend.stages={first: a}"], "backend.stages.first", "no stage first"),
        (["backend.stages={0: a}"], "backend.stages", "stage 1 has no pattern.*partitions=1"),
        (["backend.stages={0: '(', 1: b}"], "backend.stages.0", "no regular expression"),
        (["backend.default_partition=2"], "backend.default_partition", "no stage 2.* 0 to 1"),
        (["backend.default_partition=-1"], "backend.default_partition", "at least 0"),
        (["backend.placement=spred"], "backend.placement", "Did you mean 'spread'"),
    ],
)
def test_what_cannot_work(words, path, says):
    with pytest.raises(ConfigError, match=says) as caught:
        backend(*words)
    assert caught.value.path == path


GLOBAL = "trainer.loss_scope=global"


@pytest.mark.parametrize(
    "words, path, says",
    [
        (["backend.schedule=zero_bubble"], "backend.schedule", "use backend.schedule=gpipe"),
        (["backend.schedule=interleaved"], "backend.schedule", "use backend.schedule=gpipe"),
        (["trainer.accumulate=2"], "trainer.loss_scope", "trainer.accumulate=1"),
        (["backend.active_microbatches=3"], "backend.active_microbatches", "use 4 or more"),
        (["backend.chunks=2"], "backend.chunks", "gpipe has one chunk"),
    ],
)
def test_what_cannot_have_the_loss_of_a_whole_batch(words, path, says):
    with pytest.raises(ConfigError, match=says) as caught:
        backend(GLOBAL, *words)
    assert caught.value.path == path


def test_the_loss_of_a_whole_batch_runs_gpipe():
    for words in ([], ["backend.schedule=gpipe"]):
        config = load_config(None, [*PIPELINE, GLOBAL, *words])
        assert effective_pipeline(config, config.backend).schedule == "gpipe"
    config = load_config(None, PIPELINE)
    assert effective_pipeline(config, config.backend) is config.backend


def test_a_default_stage_takes_the_place_of_a_pattern():
    made = backend("backend.stages={1: head}", "backend.default_partition=0")
    assert stage_patterns(made) == {1: "head"}


def test_the_cap_of_a_schedule_that_can_keep_it():
    assert backend("backend.active_microbatches=1").active_microbatches == 1
    words = ["backend.schedule=interleaved", "backend.chunks=3"]
    assert backend(*words, "backend.active_microbatches=2").chunks == 3


@pytest.mark.parametrize("kind", ["backup_and_restore", "BackupAndRestore"])
def test_callbacks_of_whole_models_are_refused(kind):
    word = f"callbacks.mine={{type: {kind}, backup_dir: x}}"
    with pytest.raises(ConfigError, match=r"checkpoint\.every, checkpoint\.best") as caught:
        backend(word)
    assert caught.value.path == "callbacks.mine.type"
    load_config(None, [word])
    for kind in ("early_stopping", "model_checkpoint", "swap_ema_weights"):
        backend(f"callbacks.mine={{type: {kind}}}")


def test_an_imported_callback_is_known_by_its_name():
    words = ["allow=[keras.callbacks]", "callbacks.mine.type=keras.callbacks.BackupAndRestore"]
    with pytest.raises(ConfigError, match="backup_and_restore needs the weights"):
        backend(*words)


def test_names_used_elsewhere():
    with pytest.raises(ConfigError, match="backend=pipeline"):
        load_config(None, ["backend=smp"])
