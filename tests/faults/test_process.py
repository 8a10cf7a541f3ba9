"""Rows 28 and 30: nothing secret gets out, and nothing is left behind."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest

from ktrainer import Callback, ConfigError, Trainer, register
from tests.dist.small import ENGINES, group_mode
from tests.launch.conftest import launch
from tests.small import build, data, trainer
from tests.tf_distribute.running import ONE_PROCESS

__all__ = ["launch"]

SECRETS = ("hunter2-swordfish", "letmein", "pass-in-url", "token-in-query")


@register("posts_to_a_service")
class Posts(Callback):
    """A user's own callback that is configured with secrets."""

    def __init__(self, url: str, password: str, key: str, fails: bool = False) -> None:
        super().__init__()
        self.url, self.password, self.key, self.fails = url, password, key, fails

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if self.fails:
            raise RuntimeError("of the user")


def configured(folder: Path, *more: str) -> list[str]:
    url = "https://me:pass-in-url@host/x?token=token-in-query"
    return [
        f"run.dir={folder}",
        "checkpoint.every=2ba",
        "logging.progress=plain",
        "logging.tensorboard=true",
        "callbacks.posts.type=posts_to_a_service",
        f"callbacks.posts.url='{url}'",
        "callbacks.posts.password=letmein",
        "callbacks.posts.key='${oc.env:PLANTED_TOKEN}'",
        *more,
    ]


@pytest.mark.exhaustive
def test_row_28_a_planted_secret(
    tmp_path: Path, monkeypatch: Any, capfd: Any, launch: Callable[..., Any]
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", SECRETS[0])
    texts = []
    with Trainer(overrides=configured(tmp_path / "run")) as it:
        it.fit(build, data(), validation_data=data(8))
        texts += [repr(it.config), str(it.plan)]
        it.save(tmp_path / "run" / "model.keras")
    words = configured(tmp_path / "other", "callbacks.posts.fails=true")
    with Trainer(overrides=words) as it, pytest.raises(RuntimeError) as raised:
        it.fit(build, data())
    texts += traceback.format_exception(raised.value)
    words += [f"callbacks.posts.pasword={SECRETS[1]}", "trainer.epoch=3"]
    with pytest.raises(ConfigError) as wrong:
        Trainer(overrides=words)
    texts += traceback.format_exception(wrong.value, chain=True)
    screen = capfd.readouterr()
    texts += [screen.out, screen.err]
    for path in tmp_path.rglob("*"):
        texts += [str(path)] + ([path.read_bytes().decode("latin-1")] if path.is_file() else [])
    assert len(texts) > 25
    assert "val_loss" in screen.out + screen.err
    texts += [launched(tmp_path, launch)]
    for secret in SECRETS:
        assert not [text[:200] for text in texts if secret in text], secret


def launched(folder: Path, launch: Callable[..., Any]) -> str:
    """What a launcher shows of two processes in which the callback fails."""
    script = folder / "script.py"
    script.write_text(
        "from ktrainer import Trainer\n"
        "from tests.faults.test_process import build, data  # and the callback's name\n"
        "Trainer.from_cli().fit(build, data())\n"
    )
    words = configured(folder / "launched", "callbacks.posts.fails=true", "backend=data_parallel")
    done = launch("-n", 2, script, *words, warm=True)
    assert done.stderr.splitlines()[-1] == "RuntimeError: of the user", done.stderr
    return str(done.stdout + done.stderr)


# Row 30

CYCLES = 6  # what the first ones open stays; a leak of the others shows in the last ones
LOCAL_CYCLES = 20


def cycles(
    backend: str, folder: str, *words: str, count: int = CYCLES
) -> list[tuple[int, int, int]]:
    """Files, threads of Python and threads in all, after each of some fits that save."""
    seen = []
    process = psutil.Process()
    settings = {"trainer__limit_train_batches": 1, "checkpoint__every": "1ba"}
    settings |= dict(word.split("=") for word in words)
    for k in range(count):
        with trainer(backend=backend, run__dir=f"{folder}/{k}", **settings) as it:
            it.fit(lambda: build(eager=backend != "pipeline"), data(), validation_data=data(4))
        keras.utils.clear_session()
        seen.append(counts(process, seen))
    return seen


def counts(process: psutil.Process, seen: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Files, threads of Python and threads in all.

    What has been closed or joined may be the kernel's for a moment: there is some time for the
    counts to be no more than before, much where they must not be.
    """
    first = seen[3:4] or seen[-1:]
    # The first that the others are compared with is waited for, too.
    settles = len(seen) == 3 or (seen[3:] and not grows(seen[3:]))
    end = time.monotonic() + (20.0 if settles else 0.5)
    while True:
        found = process.num_fds(), threading.active_count(), process.num_threads()
        if not grows([*first, found]) or time.monotonic() > end:
            return found
        time.sleep(0.02)


def grows(seen: list[tuple[int, int, int]]) -> bool:
    """Return whether one of the counts is more at the end than at first."""
    return any(last > first for first, last in zip(seen[0], seen[-1], strict=True))


@pytest.mark.exhaustive
def test_row_30_cycles(tmp_path: Path) -> None:
    seen = cycles("local", str(tmp_path), count=LOCAL_CYCLES)
    assert not grows(seen[3:]), seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_row_30_cycles_on_ranks(ranks: Callable[..., Any], tmp_path: Path, engine: str) -> None:
    group, word = ranks(2, group_mode(engine)), f"backend__engine={engine}"
    for seen in group.run(cycles, "data_parallel", str(tmp_path), word, deadline=120):
        assert not grows(seen[3:]), seen


@pytest.mark.exhaustive
def test_row_30_cycles_of_a_pipeline(ranks: Callable[..., Any], tmp_path: Path) -> None:
    words = ("backend__partitions=2", "backend__microbatches=2")
    for seen in ranks(2).run(cycles, "pipeline", str(tmp_path), *words, deadline=180):
        assert not grows(seen[3:]), seen


@pytest.mark.exhaustive
def test_row_30_cycles_of_a_strategy(ranks: Callable[..., Any], tmp_path: Path) -> None:
    words = ("backend__strategy=mirrored", "backend__devices=2")
    group = ranks(1, ONE_PROCESS)
    (seen,) = group.run(cycles, "tf_distribute", str(tmp_path), *words, deadline=180)
    assert not grows(seen[3:]), seen
