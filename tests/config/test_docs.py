"""The reference of the keys, the commented YAML, and the files in configs/."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ktrainer.config import (
    BACKENDS,
    Config,
    config_diff,
    describe,
    load_config,
    resolved_yaml,
)
from ktrainer.config.key_reference import diff_yaml, key_docs, reference_markdown, summary
from ktrainer.config.schema_fields import group_of, hints, item_group
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import make_plan
from ktrainer.runtime.hardware import Hardware

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def groups() -> list[type]:
    found: list[type] = [Config, *BACKENDS.values()]
    for group in found:
        for hint in hints(group).values():
            inner = group_of(hint) or item_group(hint)
            if inner and inner not in found:
                found.append(inner)
    return found


@pytest.mark.parametrize("group", groups(), ids=lambda g: g.__name__)
def test_every_key_is_described(group):
    docs = key_docs(group)
    assert list(docs) == list(hints(group))
    assert all(text.endswith(".") and len(text) > 5 for text in docs.values()), docs
    assert summary(group).endswith(".")


def test_describe_names_every_key():
    text = describe()
    for key in ("seed", "trainer.epochs", "trainer.clip.norm", "backend.engine", "lr.schedule[]"):
        assert f"\n{key}" in "\n" + text
    assert "backend.partitions (a whole number; required)" in text
    assert "one of auto, horovod, mpi; default auto" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 96


def test_the_reference_page_has_a_row_for_every_key():
    page = reference_markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    described = [line.split(" ")[0] for line in describe().splitlines() if line[0] != " "]
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert sorted(keys + headings) == sorted(described)
    assert all(len(row.replace(r"\|", "").split("|")) == 6 for row in rows)
    assert "| `trainer.epochs` | a whole number | `1` |" in page


def test_describe_one_key():
    assert describe("trainer.epochs").startswith("trainer.epochs (a whole number; default 1)")
    assert len(describe("trainer.epochs").splitlines()) == 2
    assert "trainer.clip.norm" in describe("trainer")
    assert "backend=data_parallel" in describe("backend")
    with pytest.raises(ConfigError, match=r"trainer\.epochs"):
        describe("trainer.epoch")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["backend=data_parallel", "lr.schedule=[{start: 3ep, multiplier: 0.1}]"],
        ["callbacks.a={type: early_stopping, monitor: 'a: b', deep: [1, {x: null}]}"],
        ["run.dir=a ${oc.env:HOME} # ü"],
        ["run.dir=\\${literal}"],
    ],
)
@pytest.mark.parametrize("comments", [True, False])
def test_yaml_that_is_printed_loads_again(words, comments, tmp_path):
    config = load_config(None, words)
    path = tmp_path / "again.yaml"
    path.write_text(resolved_yaml(config, comments=comments))
    assert load_config(path) == config
    path.write_text(diff_yaml(config))
    assert load_config(path) == config


def test_comments_stand_above_keys():
    lines = resolved_yaml(Config()).splitlines()
    assert lines[lines.index("  epochs: 1") - 1] == "  # passes over the data."
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_files_in_configs_hold_what_differs_from_the_defaults_and_say_why(path):
    text = path.read_text()
    assert 5 <= len(text.splitlines()) <= 25
    assert yaml.safe_load(text) == config_diff(load_config(path))
    header, *body = text.split("\n\n")
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"--config configs/{path.name}" in header
    settings = [line for line in "\n".join(body).splitlines() if line.startswith("  ")]
    assert all("  # " in line or line.startswith("  name: ") for line in settings), settings


def test_configs_holds_each_way_to_run():
    names = [path.stem for path in CONFIGS]
    assert names == [
        "central_storage",
        "data_parallel",
        "data_parallel_horovod",
        "default_strategy",
        "local",
        "mirrored",
        "multi_worker_mirrored",
        "one_device",
        "parameter_server",
        "per_worker",
        "pipeline",
        "pipeline_hybrid",
        "tpu",
    ]
    configs = dict(zip(names, map(load_config, CONFIGS), strict=True))
    engines = {n: c.backend.engine for n, c in configs.items() if hasattr(c.backend, "engine")}
    assert list(engines.values()) == ["mpi", "horovod", "auto", "auto", "mpi"]
    strategies = [n for n, c in configs.items() if getattr(c.backend, "strategy", None) == n]
    assert len(strategies) == 6
    assert configs["per_worker"].data.batch == "per_worker"
    assert make_plan(configs["pipeline"], Hardware(size=2)).replicas == 1
    assert make_plan(configs["pipeline_hybrid"], Hardware(size=4)).replicas == 2
