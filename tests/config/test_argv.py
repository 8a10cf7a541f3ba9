"""The command line of a script."""

from __future__ import annotations

import argparse

import pytest

from ktrainer.config import load_config, parse_cli, parse_known_cli
from ktrainer.config.command_line import compare_words, give_words, require_taken_words, take_words
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


@pytest.fixture
def words_of_the_launch():
    yield give_words
    give_words(())


HAS = {"backend": {"name": "data_parallel", "engine": "mpi"}, "user": {"lr": 1.0, "more": {}}}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["backend=data_parallel", "trainer.epochs=1"],
        ["backend={name: data_parallel}", "user.lr=1"],
        ["world.threads=3"],  # the launcher's
        ["--config=FILE", "run.dir=runs/${backend.engine}"],
    ],
)
def test_a_trainer_that_has_the_words_of_the_launch(words, words_of_the_launch, tmp_path):
    (tmp_path / "run.yaml").write_text("backend: {name: data_parallel}\nuser: {more: {a: 1}}\n")
    words = [word.replace("FILE", str(tmp_path / "run.yaml")) for word in words]
    words_of_the_launch(words)
    path, overrides = parse_cli(words)
    kept = [word for word in overrides if not word.startswith("world")]
    compare_words(load_config(path, kept, defaults=HAS))
    require_taken_words()
    compare_words(load_config({"seed": 9}))  # the script's second Trainer may be another one
    require_taken_words()


@pytest.mark.parametrize(
    "words, says",
    [
        (["backend=data_parallel", "trainer.epochs=30"], r"trainer\.epochs has no effect"),
        (["backend=data_parallel", "backend.compression=bf16"], r"backend\.compression has no"),
        (["backend={name: data_parallel, engine: horovod}"], r"backend\.engine has no effect"),
        (["backend=local"], r"backend\.name has no effect"),
        (["trainer.epochs=1", "user.lr=2"], r"user\.lr has no effect"),
        (["--config=FILE", "backend=data_parallel"], r"--config=\S+ has no effect"),
        (["backend.partitions=2"], "but the backend is data_parallel"),
        # The launcher waits for as long as the ranks' Trainer says.
        (["trainer.interrupt.grace=60"], r"trainer\.interrupt\.grace has no effect"),
    ],
)
def test_a_trainer_without_the_words_of_the_launch(words, says, words_of_the_launch, tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {epochs: 30}\n")
    words_of_the_launch([word.replace("FILE", str(tmp_path / "run.yaml")) for word in words])
    compare_words(load_config(HAS))
    with pytest.raises(ConfigError, match=says):
        require_taken_words()
    take_words()  # by a Trainer from the command line
    require_taken_words()
    compare_words(load_config(HAS))
    require_taken_words()
