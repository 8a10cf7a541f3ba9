"""What `ktrainer plan` refuses, and says of it."""

from __future__ import annotations

import contextlib
import re

import pytest

from ktrainer.cli import main
from tests.plan_report.scripts import PIPELINE, SCRIPT, SEQUENTIAL


@pytest.mark.parametrize(
    "words, says",
    [
        (["-n", "3"], "3 processes are no multiple of 2 partitions: start with .* -n 2"),
        (["backend.chunks=2"], "backend.schedule=interleaved"),
        (["backend=local", "-n", "2"], "local is one process"),
        (["--picture", "x.gif"], "must end in .svg or .png"),
        (["--picture", "not/there/x.svg"], "no folder 'not/there'"),
        (["--config", "other.yaml"], "give one configuration"),
        (["trainer.epoch=3"], "Did you mean 'trainer.epochs'"),
    ],
)
def test_what_a_configuration_cannot_do(config, words, says, capsys):
    assert main.main(["plan", config, *words]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_script_that_continues_after_an_error(script, capsys):
    # The script catches every Exception, and this is one.
    assert main.main(["plan", script, "backend=pipeline", "backend.partitions=9"]) == 2
    out, err = capsys.readouterr()
    assert "caught" in out
    assert "without fit" in err


def test_mistakes_are_told_alike_wherever_they_are_found(config, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from ktrainer import Trainer\nTrainer.from_cli()\n")
    for target in (config, str(path)):
        with contextlib.suppress(SystemExit):
            assert main.main(["plan", target, "trainer.epoch=3"]) == 2
        assert capsys.readouterr().err.startswith("ktrainer plan: error: trainer.epoch")


def test_what_a_model_cannot_do(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("except Exception", "except ZeroDivisionError"))
    words = ["backend=pipeline", "backend.partitions=9"]
    assert main.main(["plan", str(path), *words]) == 2
    assert "The nearest legal value is 8" in capsys.readouterr().err
    words = [*PIPELINE, "backend.memory_limit=9KB"]
    assert main.main(["plan", str(path), *words]) == 2
    assert re.search(r"keeps each within 9000 bytes. The least .* is \d+", capsys.readouterr().err)


PLAIN = 'model.compile("adam", "mse")'
BACKUP = 'callbacks=[keras.callbacks.BackupAndRestore("x")]'
PICKY = """
class Picky(keras.Model):
    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def call(self, x, training=False):
        for layer in self.stack:
            x = layer(x)
        return x if training else x[:, : int(x[0, 0])]

"""
CAP = ("backend.schedule=gpipe", "backend.active_microbatches=4", "trainer.accumulate=2")


@pytest.mark.parametrize(
    ("old", "new", "words", "says"),
    [
        (
            '"adam"',
            "keras.optimizers.Adam(gradient_accumulation_steps=2)",
            (),
            "set trainer.accumulate instead",
        ),
        (PLAIN, 'model.compile("sgd", "mse", run_eagerly=True)', (), "run_eagerly=True"),
        ("*stack]", "*stack, layers.BatchNormalization(synchronized=True)]", ("-n", "4"), "=True"),
        ("(x, x)", f"(x, x), {BACKUP}", (), "BackupAndRestore needs the weights of the whole"),
        ('"--own"]', f'"--own"], {BACKUP}', (), "needs the weights of the whole model"),
        (f"keras.{SEQUENTIAL}", "Picky(stack)", (), "Picky 'picky' cannot be traced"),
        ("x, x", "x, x", CAP, "all 8 microbatches of an update are in flight"),
    ],
    ids=["accumulates", "eager", "synchronized", "of-fit", "of-trainer", "inference", "cap"],
)
def test_what_fit_refuses(tmp_path, capsys, old, new, words, says):
    path = tmp_path / "train.py"
    text = SCRIPT.replace("except Exception", "except ZeroDivisionError")
    assert old in text
    path.write_text(text.replace("def build", PICKY + "\ndef build").replace(old, new))
    with contextlib.suppress(SystemExit):
        assert main.main(["plan", str(path), *PIPELINE, *words]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert "rank 0" not in out
