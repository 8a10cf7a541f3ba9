"""The command line of a script."""

from __future__ import annotations

import argparse

import pytest

from ktrainer.config import parse_cli, parse_known_cli
from ktrainer.errors import ConfigError


@pytest.mark.parametrize(
    "argv, path, overrides",
    [
        ([], None, []),
        (["--config", "a.yaml", "seed=1"], "a.yaml", ["seed=1"]),
        (["seed=1", "--config=a.yaml", "backend=local"], "a.yaml", ["seed=1", "backend=local"]),
        (["--config=-odd.yaml"], "-odd.yaml", []),
        (["run.dir=a=b"], None, ["run.dir=a=b"]),
    ],
)
def test_file_and_overrides(argv, path, overrides):
    assert parse_cli(argv) == (path, overrides)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--config"], "needs the path"),
        (["--config", "--other"], "needs the path"),
        (["--config="], "needs the path"),
        (["--config", "a", "--config", "b"], "given twice"),
        (["epochs"], "write key=value"),
        (["--trainer.epochs=3"], r"write trainer\.epochs=3"),
        (["--epochs", "3"], r"write trainer\.epochs=VALUE"),
        (["--data-dir", "x"], "parse_known_args"),
    ],
)
def test_other_words_are_refused(argv, says):
    with pytest.raises(ConfigError, match=says):
        parse_cli(argv)


def test_a_script_with_options_of_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    own, rest = parser.parse_known_args(
        ["--data-dir", "x", "--config", "a.yaml", "seed=1", "run.dir=b"]
    )
    assert own.data_dir == "x"
    assert parse_cli(rest) == ("a.yaml", ["seed=1", "run.dir=b"])


def test_unknown_words_can_be_left():
    argv = ["--data-dir", "x", "seed=1", "--flag=a=b", "--config", "c", "--", "k=v"]
    known = parse_known_cli(argv)
    assert known == ("c", ["seed=1"], ["--data-dir", "x", "--flag=a=b", "k=v"])


def test_help_prints_the_keys(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_cli(["--help"])
    assert caught.value.code == 0
    assert "trainer.epochs (a whole number" in capsys.readouterr().out
