"""Checks of commands that cannot run here: do the programs, options, keys and files exist?"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

from ktrainer.cli.main import COMMANDS
from ktrainer.config import load_config, parse_cli

ROOT = Path(__file__).resolve().parents[2]


def check_command(command: str) -> None:
    """Fail if a shell command is not well-formed, or names what does not exist."""
    subprocess.run(["bash", "-n", "-c", command], check=True)
    words = shlex.split(command, comments=True)
    while words and (words[0] == "exec" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words.pop(0)
    program, *rest = words
    if program == "ktrainer":
        _check_ktrainer(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), command
    elif program == "pip":
        _check_install(rest)
    elif "python" in words:
        _check_script(words[words.index("python") + 1 :])
    else:
        assert program in ("sbatch", "source", "git", "export"), f"not checked: {command}"


def _check_ktrainer(words: list[str]) -> None:
    name = next((n for n in COMMANDS if words[: n.count(" ") + 1] == n.split()), None)
    assert name, f"there is no command {words}"
    parser = argparse.ArgumentParser(exit_on_error=True)
    module = import_module(COMMANDS[name][0])
    module.add_arguments(parser)
    args = parser.parse_args(words[name.count(" ") + 1 :])
    settings = getattr(args, "args", [])
    _check_settings([word for word in settings if not word.startswith("-")])


def _check_install(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(extras), extra


def _check_script(words: list[str]) -> None:
    path, *settings = words
    if "/" in path:
        assert (ROOT / path).is_file(), path
    if not path.startswith("-"):
        _check_settings(settings)


def _check_settings(words: list[str]) -> None:
    """Load the keys among the words, as a script would."""
    keys = [word for word in words if re.match(r"[\w.]+=", word)]
    load_config(*parse_cli(keys))
