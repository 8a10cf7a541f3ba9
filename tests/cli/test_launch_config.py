"""What a launch checks before anything starts, and what it leaves to the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ktrainer.cli.launch_config import checked_config
from ktrainer.config import Config, load_config
from ktrainer.errors import ConfigError

SCRIPTS = {"own": "from ktrainer import Trainer\n", "plain": "import keras\n"}
PARALLEL = {"backend": "data_parallel"}
STAGES = {"backend": {"name": "pipeline", "partitions": 2}}
PER_WORKER = {"data": {"batch": "per_worker"}}
INTERLEAVED = {"backend": {"name": "pipeline", "schedule": "interleaved", "chunks": 2}}
HEAD = {"backend": {"name": "pipeline", "stages": {"1": "head"}}}
ALL_STAGES = {"backend": {**INTERLEAVED["backend"], "stages": {"0": "a", "1": "b", "3": "d"}}}
STRATEGY = {"backend": {"name": "tf_distribute", "strategy": "multi_worker_mirrored"}}
SERVERS = {"backend": {"name": "tf_distribute", "strategy": "parameter_server"}}

# Words, and defaults of a script with which they work.
SETTLED = [
    (["health.nan=rollback"], {"checkpoint": {"every": "1ep"}}),
    (["health.nan=rollback"], {"checkpoint": {"best": "val_loss"}}),
    (["health.on_spike=skip"], {"health": {"spike": 3}}),
    (["watch.layers=true"], {"watch": {"norms": "10ba"}}),
    (["watch.communication=true"], PARALLEL),
    (["world.heal=true"], PARALLEL),
    (["logging.histograms=1000ba"], {"logging": {"tensorboard": True}}),
    (["checkpoint.mode=max"], {"checkpoint": {"best": "val_f1"}}),
    (["backend.microbatches=8"], STAGES),
    (["backend={name: tf_distribute}", "backend.bytes_per_pack=9"], STRATEGY),
    (["backend=tf_distribute"], STRATEGY),
    (["backend=tf_distribute", "backend.auto_shard=off"], STRATEGY | PER_WORKER),
    (["backend=pipeline", "backend.partitions=2", "backend.chunks=2"], INTERLEAVED),
    (["backend=pipeline", "backend.microbatches=8"], STAGES),
    (["backend=pipeline", "backend.partitions=2", 'backend.stages={"0": embed}'], HEAD),
    (["backend=pipeline", "backend.partitions=2", 'backend.stages={"2": embed}'], ALL_STAGES),
    (["backend=pipeline", "backend.partitions=2", "backend.default_partition=2"], INTERLEAVED),
]

# Words that contradict one another whatever a script's defaults are.
REFUSED = [
    ["health.nan=rollback", "checkpoint.every=null", "checkpoint.best=null"],
    ["health.nan=rollback", "checkpoint.every=1ep", "world.heal=true"],
    ["health.on_spike=skip", "health.spike=null"],
    ["watch.layers=true", "watch.norms=null"],
    ["watch.communication=true", "backend=pipeline", "backend.partitions=2"],
    ["world.heal=true", "backend=tf_distribute"],
    ["logging.histograms=1000ba", "logging.tensorboard=false"],
    ["logging.histograms=1000ba", "trainer.xla=true"],
    ["checkpoint.mode=max", "checkpoint.best=null"],
    ["backend=tf_distribute", "backend.strategy=mirrored"],
    ["backend=data_parallel", "backend.microbatches=8"],
    ["backend=pipeline", "backend.strategy=mirrored"],
    ["backend=pipeline", "backend.partitions=2", 'backend.stages={"a": embed}'],
    ["backend.microbatch=8"],
    ["checkpoint.every=soon"],
]


def check(folder: Path, kind: str, words: list[str], workers: int | None = None) -> Config | None:
    path = folder / f"{kind}.py"
    path.write_text(SCRIPTS[kind])
    return checked_config(str(path), words, 2, workers, {})


def as_file(folder: Path, words: list[str]) -> list[str]:
    """The words that read `words` from a file."""
    tree: dict[str, object] = {}
    for word in words:
        key, _, value = word.partition("=")
        group, _, leaf = key.partition(".")
        inner = {leaf: yaml.safe_load(value)} if leaf else yaml.safe_load(value)
        known = tree.get(group)
        known = {"name": known} if isinstance(known, str) else known
        tree[group] = {**known, **inner} if isinstance(known, dict) else inner
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return ["--config", str(folder / "run.yaml")]


@pytest.mark.parametrize(("words", "defaults"), SETTLED)
def test_what_the_script_may_settle_is_left_to_the_ranks(tmp_path, words, defaults):
    assert load_config(None, words, defaults=defaults)  # what the ranks do
    assert check(tmp_path, "own", words) is not None
    assert check(tmp_path, "own", as_file(tmp_path, words)) is not None
    with pytest.raises(ConfigError):  # a plain script has no defaults
        check(tmp_path, "plain", words)


def test_the_strategy_of_a_cluster_may_be_the_script_s(tmp_path):
    words = ["backend=tf_distribute", "backend.timeout=60"]
    assert load_config(None, words, defaults=SERVERS)
    assert check(tmp_path, "own", words, workers=1) is not None
    for kind, more in [("plain", []), ("own", ["backend.strategy=mirrored"])]:
        with pytest.raises(ConfigError):
            check(tmp_path, kind, [*words, *more], workers=1)


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_words_alone_contradict_is_refused(tmp_path, kind, words):
    with pytest.raises(ConfigError):
        check(tmp_path, kind, words)
    with pytest.raises(ConfigError):
        check(tmp_path, kind, as_file(tmp_path, words))


def test_a_launch_heals_by_words_whose_backend_is_the_script_s(tmp_path):
    assert check(tmp_path, "own", ["world.heal=true", "world.max_size=4"]).world.max_size == 4
