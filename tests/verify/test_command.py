"""`ktrainer verify`: a sound script and a wrong one, run twice each."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from ktrainer.cli import main, verify_command
from ktrainer.cli.launch_config import checked_config
from ktrainer.cli.verify_command import add_arguments
from ktrainer.config import LocalConfig
from ktrainer.verify.verify_mode import VARIABLE, VerifyRun
from tests.processes import ktrainer, python

SCRIPT = """
import sys
import keras, numpy as np
from keras import layers, ops
from ktrainer import Trainer

class Contrastive(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = ops.matmul(ops.normalize(y_pred), ops.transpose(ops.normalize(y)))
        rows = ops.arange(ops.shape(scores)[0])
        each = keras.losses.sparse_categorical_crossentropy(rows, scores, from_logits=True)
        return ops.mean(each)

wrong = sys.argv.count("--wrong")
keras.config.set_floatx("float64")
words = [word for word in sys.argv[1:] if word != "--wrong"]
trainer = Trainer.from_cli(argv=words, defaults={"data": {"batch_size": 8}})
inputs = keras.Input((6,))
hidden = layers.Dropout(0.4)(layers.Dense(7, activation="tanh", name="hidden")(inputs))
outputs = layers.Dense(3, name="head")(layers.GaussianNoise(0.1)(hidden))
model = (Contrastive if wrong else keras.Model)(inputs, outputs)
model.compile("adam", None if wrong else "mse", metrics=["mae"])
x, y = np.random.normal(size=(32, 6)), np.random.normal(size=(32, 3))
trainer.fit(model, (x, y), callbacks=[keras.callbacks.CSVLogger("log.csv")])
print("not reached")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.exhaustive
def test_a_sound_script_in_two_stages(script: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("backend: {name: pipeline, partitions: 2, microbatches: 2}\n")
    words = ["verify", "-n", "2", script, "--config", str(config), "trainer.accumulate=2"]
    done = ktrainer(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for name in ("loss +loss", "metric +mae", "gradient +hidden/kernel", "weight +head/bias"):
        assert re.search(rf"^{name} .* equal to rounding$", out, re.M), out
    assert "equal: 2 updates as configured, in 2 processes," in out
    assert "reached" not in out
    assert sorted(os.listdir(tmp_path)) == ["run.yaml", "train.py"]  # no run folder, no log


@pytest.mark.exhaustive
def test_a_wrong_script_on_two_ranks(script: str, tmp_path: Path) -> None:
    # One process has no ranks that heal, nor the same speed and messages.
    words = ["backend=data_parallel", "world.heal=true", "watch.communication=true"]
    words += ["watch.speed=true", "watch.memory=true"]
    done = ktrainer("verify", "-n", 2, "--steps", 1, script, "--wrong", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    out = done.stdout
    assert re.search(r"^gradient +head/kernel +\S+ +1  differs$", out, re.M), out
    assert "couples examples" in out
    assert "trainer.loss_scope=global" in out


def test_usage(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["verify", "-n", "2", script, "backend=pipelin"]) == 2
    assert "did you mean" in capfd.readouterr().err.lower()
    per_worker = ["backend=data_parallel", "data.batch=per_worker"]
    assert main.main(["verify", "-n", "2", script, *per_worker]) == 2
    assert "no unsplit equivalent" in capfd.readouterr().err
    local = ["backend=data_parallel", "backend.local_layers=[head]"]
    assert main.main(["verify", "-n", "2", script, *local]) == 2
    assert "no equivalent in one process" in capfd.readouterr().err
    assert main.main(["verify", "missing.py"]) == 2
    (tmp_path / "empty.py").write_text("print('hello')\n")
    # In a process of its own: a launch ends all others below it, as the tests' groups of ranks.
    code = (
        "import os, sys; from ktrainer.cli import main\n"
        "code = main.main(['verify', sys.argv[1]])\n"
        f"assert {VARIABLE!r} not in os.environ; sys.exit(code)"
    )
    done = python("-c", code, tmp_path / "empty.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "nothing to verify" in done.stderr
    assert "train_on_batch is not recorded" in done.stderr


def test_runs_without_an_update_are_refused(
    script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "_run", lambda *_: None)
    assert main.main(["verify", script]) == 2
    assert "fit has made no update, so there is nothing to compare" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["backend=pipeline", "backend.partitions=2", "backend.microbatches=2"],
        ["backend=data_parallel", "world.heal=true", "world.replace=true", "world.max_size=4"],
        ["backend=data_parallel", "world.heal=true", "world.min_size=2"],
        ["backend=data_parallel", "watch.communication=true"],
        ["backend=tf_distribute", "backend.strategy=parameter_server"],
    ],
    ids=" ".join,
)
def test_one_process_of_words_for_several(
    script: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = VerifyRun("unsplit", "folder", 2)
    monkeypatch.setenv(VARIABLE, unsplit.to_environment()[VARIABLE])
    config = checked_config(script, [*words, "data.batch_size=9"], 1, None, {})
    assert config is not None
    assert config.backend == LocalConfig()
    assert (config.world.heal, config.watch.communication) == (False, False)
    assert config.data.batch_size == 9


def test_options_after_the_script_are_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["-n", "2", "train.py", "--steps", "9", "--threads=1"])
    assert (args.ranks, args.steps, args.threads) == (2, None, None)
    assert args.args == ["--steps", "9", "--threads=1"]


PLAIN = """
import numpy as np
import keras
from keras import layers

random = np.random.default_rng()
x, y = random.normal(size=(32, 6)), random.normal(size=(32, 3))
inputs = keras.Input((6,))
hidden = layers.Dropout(0.4)(layers.Dense(7, activation="tanh", name="hidden")(inputs))
model = keras.Model(inputs, layers.Dense(3, name="head")(hidden))
model.compile("adam", "mse", metrics=["mae"])
model.fit(x, y, batch_size=8, epochs=7, initial_epoch=5, validation_split=0.25)
print("not reached")
"""


@pytest.mark.exhaustive
def test_a_script_that_has_never_heard_of_ktrainer(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    words = ["backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=2"]
    done = ktrainer("verify", path, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert re.search(r"^weight +head/kernel .* equal to rounding$", out, re.M), out
    assert "equal: 2 updates as configured, in 1 process," in out
    assert "reached" not in out
