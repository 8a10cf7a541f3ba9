"""The folder of a run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ktrainer.config import load_config
from ktrainer.distributed.world import SingleWorld
from ktrainer.errors import SetupError
from ktrainer.runtime.run_folder import library_versions, of_fit, open_run_folder


class Follower(SingleWorld):
    """Rank 1, to which rank 0 sent `sent`."""

    rank, size = 1, 2

    def __init__(self, sent):
        self.sent = sent

    def broadcast(self, value, root=0, what="broadcast"):
        assert value == (None, None)
        return self.sent


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_what_is_in_it(tmp_path):
    config = load_config(None, ["run.dir=out/deep", "trainer.epochs=3", "backend=data_parallel"])
    old = os.umask(0)
    try:
        path = open_run_folder(config, SingleWorld())
    finally:
        os.umask(old)
    assert path == tmp_path / "out" / "deep"
    assert mode(path) == 0o700
    files = {"config.yaml", "config.diff.yaml", "versions.json"}
    assert {p.name for p in path.iterdir()} == files
    assert all(mode(path / name) == 0o600 for name in files)
    assert load_config(path / "config.yaml") == config
    assert load_config(path / "config.diff.yaml") == config
    assert "run" in (path / "config.diff.yaml").read_text()
    assert json.loads((path / "versions.json").read_text())["omegaconf"]


def test_names_are_made_and_never_shared(tmp_path):
    made = {open_run_folder(load_config(), SingleWorld()) for _ in range(4)}
    assert len(made) == 4
    assert {path.parent for path in made} == {tmp_path / "runs"}
    assert all(mode(path) == 0o700 for path in made)


def test_time_in_the_name(tmp_path):
    path = open_run_folder(load_config(None, ["run.dir=a-{time}"]), SingleWorld())
    assert path.name.startswith("a-20")


def test_a_folder_that_is_there_is_used_again(tmp_path):
    (tmp_path / "out").mkdir(mode=0o755)
    (tmp_path / "out" / "mine.txt").write_text("kept")
    for seed in (1, 2):
        path = open_run_folder(load_config(None, ["run.dir=out", f"seed={seed}"]), SingleWorld())
    assert (path / "mine.txt").read_text() == "kept"
    assert load_config(path / "config.yaml").seed == 2


def test_other_ranks_take_what_rank_0_made(tmp_path):
    world = Follower((str(tmp_path / "chosen"), None))
    assert open_run_folder(load_config(), world) == tmp_path / "chosen"
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(SetupError, match=r"run\.dir=PATH"):
            open_run_folder(load_config(None, [f"run.dir={name}"]), SingleWorld())
    with pytest.raises(SetupError, match="full"):
        open_run_folder(load_config(), Follower((None, "the disk is full")))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(SetupError, match="Permission denied"):
        open_run_folder(load_config(None, ["run.dir=out"]), SingleWorld())


def test_secrets_are_not_saved(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-swordfish")
    words = ["run.dir=out", "callbacks.a={type: loss_guard, x: '${oc.env:MY_TOKEN}', key: letmein}"]
    path = open_run_folder(load_config(None, words), SingleWorld())
    for file in path.iterdir():
        assert "hunter2" not in file.read_text()
        assert "letmein" not in file.read_text()


def test_versions_name_what_is_here():
    found = library_versions()
    assert {"python", "platform", "numpy", "omegaconf"} <= set(found)


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("metrics.csv", "metrics-2.csv"),
        ("throughput.jsonl", "throughput-2.jsonl"),
        ("checkpoints", "checkpoints-2"),
        ("model.v1", "model.v1-2"),
    ],
)
def test_what_each_fit_writes_has_a_name_of_its_own(name: str, second: str) -> None:
    assert of_fit(Path("run", name), 1) == Path("run", name)
    assert of_fit(Path("run", name), 2) == Path("run", second)
