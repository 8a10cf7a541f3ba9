"""Merging schema < YAML < command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ktrainer.config import (
    Config,
    DataParallelConfig,
    LocalConfig,
    config_diff,
    load_config,
)
from ktrainer.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_nothing_gives_the_defaults():
    config = load_config()
    assert config == Config()
    assert config.backend == LocalConfig()
    assert (config.seed, config.trainer.epochs, config.data.batch_size) == (0, 1, 32)


def test_later_layers_win(tmp_path):
    path = write(tmp_path, "trainer: {epochs: 5, max_steps: 7}\ndata: {batch_size: 8}\n")
    config = load_config(path, ["trainer.epochs=9"])
    assert (config.trainer.epochs, config.trainer.max_steps, config.data.batch_size) == (9, 7, 8)
    assert config.trainer.accumulate == 1


@pytest.mark.parametrize(
    "source",
    [
        {"trainer": {"epochs": 3}},
        {"trainer": {"epochs": np.int64(3)}},
        {"trainer": {"epochs": "${data.prefetch}"}, "data": {"prefetch": 3}},
        OmegaConf.create({"trainer": {"epochs": 3}}),
        Config(trainer=dataclasses.replace(Config().trainer, epochs=3)),
    ],
)
def test_every_kind_of_source(source):
    assert load_config(source).trainer.epochs == 3
    assert load_config(source, ["seed=5"]).trainer.epochs == 3


def test_path_objects(tmp_path):
    write(tmp_path, "seed: 4")
    config = load_config(tmp_path / "run.yaml", ["run.dir=x"])
    assert config.seed == 4
    assert load_config({"run": {"dir": tmp_path}}).run.dir == str(tmp_path)


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n")) == Config()


def test_the_dict_that_is_given_stays_as_it_is():
    source = {"backend": "data_parallel", "callbacks": {"a": {"type": "early_stopping"}}}
    load_config(source, ["callbacks.a.patience=3", "backend.engine=mpi"])
    assert source == {
        "backend": "data_parallel",
        "callbacks": {"a": {"type": "early_stopping"}},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["backend=data_parallel", "backend.engine=mpi"],
        ["backend.engine=mpi", "backend=data_parallel"],
        ["backend.engine=mpi", "backend.name=data_parallel"],
        ["backend={name: data_parallel, engine: mpi}"],
        ["backend.engine=mpi", "backend={name: data_parallel}"],
    ],
)
def test_a_backend_and_its_keys_in_any_order(words):
    assert load_config(None, words).backend == DataParallelConfig(engine="mpi")


def test_a_backend_by_name_in_a_file(tmp_path):
    path = write(tmp_path, "backend: data_parallel\n")
    assert load_config(path).backend == DataParallelConfig()
    assert load_config(path, ["backend.op=sum"]).backend == DataParallelConfig(op="sum")


def test_naming_another_backend_drops_the_keys_of_the_one_before(tmp_path):
    path = write(tmp_path, "backend: {name: data_parallel, engine: mpi}\n")
    assert load_config(path, ["backend=local"]).backend == LocalConfig()
    assert load_config(path, ["backend=data_parallel"]).backend.engine == "mpi"
    assert load_config(path, ["backend.op=sum"]).backend.engine == "mpi"


def test_a_backend_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOW", "data_parallel")
    assert load_config(None, ["backend=${oc.env:HOW}"]).backend.name == "data_parallel"


def test_names_that_scripts_rely_on():
    words = [
        "seed=1", "run.dir=out", "trainer.epochs=2", "trainer.max_steps=3",
        "data.batch=per_worker", "data.batch_size=4", "data.shuffle=false",
        "checkpoint.dir=ck", "checkpoint.every=5ba", "checkpoint.resume=never",
        "callbacks.es.type=early_stopping",
    ]  # fmt: skip
    load_config(None, [*words, "backend=data_parallel", "backend.engine=horovod"])
    load_config(
        None, [*words, "backend=pipeline", "backend.partitions=2", "backend.microbatches=8"]
    )
    load_config(None, [*words, "backend=tf_distribute", "backend.strategy=mirrored"])
    devices = load_config(None, ["backend=tf_distribute", "backend.devices=2"]).backend.devices
    assert devices == 2


@pytest.mark.parametrize(
    "word, value",
    [
        ("run.dir=0012", "0012"),
        ("run.dir=1e3", "1e3"),
        ("run.dir=a=b", "a=b"),
        ("run.dir='quoted'", "quoted"),
        ("run.dir=null", None),
        ("run.dir=s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_texts_on_the_command_line(word, value):
    assert load_config(None, [word]).run.dir == value


@pytest.mark.parametrize("text", ["2024_10_01", "0012", "1e3", "1.10", "on", "1:30"])
def test_texts_in_a_file(tmp_path, text):
    """As they are written, also where YAML reads a number or a truth value."""
    assert load_config(write(tmp_path, f"run:\n  dir: {text}  # a name\n")).run.dir == text
    aliased = f"user: {{name: &a '{text}'}}\ncheckpoint: {{best: *a, dir: {text}}}\n"
    checkpoint = load_config(write(tmp_path, aliased)).checkpoint
    assert (checkpoint.best, checkpoint.dir) == (text, text)
    phase = f"lr:\n  schedule:\n  - {{start: {text}, multiplier: 1}}\n"
    for source in (phase, f"trainer: {{max_time: {text}}}"):
        with pytest.raises(ConfigError, match=f"'{text}' (is not a duration|has no unit)"):
            load_config(write(tmp_path, source))


def test_interpolation(monkeypatch):
    monkeypatch.setenv("KT_BATCH", "48")
    config = load_config(
        {"data": {"batch_size": "${oc.env:KT_BATCH}"}, "run": {"dir": "runs/b${data.batch_size}"}},
        ["world.deadline=${oc.env:NOT_THERE,12.5}"],
    )
    assert config.data.batch_size == 48
    assert config.run.dir == "runs/b48"
    assert config.world.deadline == 12.5


def test_fast_dev_run_takes_true():
    assert load_config(None, ["trainer.fast_dev_run=true"]).trainer.fast_dev_run == 1
    tries = load_config(None, ["trainer.fast_dev_run=false"]).trainer.fast_dev_run
    assert tries == 0
    assert type(tries) is int


def test_a_callback_is_taken_away_by_null():
    source = {"callbacks": {"es": {"type": "early_stopping"}, "n": {"type": "loss_guard"}}}
    assert list(load_config(source, ["callbacks.es=null"]).callbacks) == ["n"]


def test_schedule_items_are_typed():
    config = load_config(None, ["lr.schedule=[{start: 3ep, multiplier: 0.1}]"])
    phase = config.lr.schedule[0]
    assert (phase.start, phase.multiplier, phase.end) == ("3ep", 0.1, None)


def test_the_result_is_read_only_and_can_be_sent():
    config = load_config(None, ["backend=data_parallel", "callbacks.a.type=loss_guard"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.epochs = 3  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert type(again.backend) is DataParallelConfig
    values = config.to_dict()
    values["callbacks"]["a"]["type"] = "other"
    assert config.callbacks["a"]["type"] == "loss_guard"


def test_config_diff():
    assert config_diff(load_config()) == {}
    assert config_diff(load_config(None, ["backend=data_parallel", "seed=3"])) == {
        "seed": 3,
        "backend": {"name": "data_parallel"},
    }
    words = ["backend=data_parallel", "trainer.epochs=3", "backend.engine=mpi"]
    assert config_diff(load_config(None, words)) == {
        "trainer": {"epochs": 3},
        "backend": {"name": "data_parallel", "engine": "mpi"},
    }


WORDS = {
    "seed": st.none() | st.integers(0, 2**32 - 1),
    "trainer.epochs": st.integers(1, 10**6),
    "trainer.max_time": st.sampled_from(["null", "2h", "1h30m", "90s"]),
    "trainer.limit_train_batches": st.integers(1, 99) | st.sampled_from([0.1, 0.5, 1.0]),
    "trainer.xla": st.booleans(),
    "data.batch": st.sampled_from(["global", "per_worker"]),
    "backend": st.sampled_from(["data_parallel"]),
    "backend.engine": st.sampled_from(["auto", "mpi", "horovod"]),
    "backend.bucket_mb": st.none() | st.floats(0.1, 1e4),
    "checkpoint.every": st.sampled_from(["null", "1ep", "500ba", "10m"]),
    "callbacks.a.type": st.sampled_from(["loss_guard", "EarlyStopping"]),
    "callbacks.a.patience": st.integers(0, 9),
}


def as_word(key: str, value: object) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    keys = set(draw(st.lists(st.sampled_from(sorted(WORDS)), unique=True)))
    if any(k.startswith("backend.") for k in keys):
        keys.add("backend")
    if any(k.startswith("callbacks.") for k in keys):
        keys.add("callbacks.a.type")
    return [as_word(key, draw(WORDS[key])) for key in sorted(keys)]


@settings(max_examples=25)
@given(overrides(), st.randoms(use_true_random=False))
def test_order_makes_no_difference(words, random):
    shuffled = list(words)
    random.shuffle(shuffled)
    assert load_config(None, shuffled) == load_config(None, words)


@settings(max_examples=25)
@given(overrides())
def test_what_is_saved_loads_again(words):
    config = load_config(None, words)
    assert load_config(config.to_dict()) == config
    assert load_config(config_diff(config)) == config
    assert load_config(config, ["seed=1"]) == load_config(None, [*words, "seed=1"])


@settings(max_examples=25)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_loads_or_is_refused_clearly(key, value):
    for words in ([f"{key}={value}"], [f"run.dir={value}"], [f"callbacks.{key}.type={value}"]):
        with contextlib.suppress(ConfigError):
            assert isinstance(load_config(None, words), Config)
