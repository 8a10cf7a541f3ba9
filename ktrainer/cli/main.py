"""The `ktrainer` command. A sub-command is imported only when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ktrainer.errors import ConfigError, KtrainerError, nearest

# name -> (module with add_arguments(parser) and run(args) -> int, summary)
COMMANDS = {
    "run": ("ktrainer.cli.run_command", "run a Keras script, in one process or in several"),
    "launch": ("ktrainer.cli.run_command", "another name for run"),
    "submit": (
        "ktrainer.cli.submit_command",
        "write and explain the file that starts a run on a cluster: Slurm, Kubernetes, SkyPilot",
    ),
    "plan": ("ktrainer.cli.plan_command", "show what a run would do, or why it cannot"),
    "verify": (
        "ktrainer.cli.verify_command",
        "check that a script trains the same as in one process",
    ),
    "lr-find": ("ktrainer.cli.lr_find_command", "suggest a learning rate, by a range test"),
    "sweep": ("ktrainer.cli.sweep_command", "try settings, in trials that Optuna chooses"),
    "data-service": (
        "ktrainer.cli.data_service_command",
        "compute input pipelines for training jobs, with tf.data service",
    ),
    "config": (
        "ktrainer.cli.config_command",
        "print the resolved configuration, or describe its keys",
    ),
    "checkpoint": (
        "ktrainer.cli.checkpoint_command",
        "list, show, verify, export and import checkpoints",
    ),
    "runs": (
        "ktrainer.cli.runs_command",
        "list runs: state, progress, best values, how to resume",
    ),
    "compare": (
        "ktrainer.cli.compare_command",
        "show where two runs first differ, and what else differs",
    ),
    "report": (
        "ktrainer.cli.report_command",
        "write a page with the curves of runs, what happened in them, and where they differ",
    ),
    "watch": ("ktrainer.cli.watch_command", "show a run in the terminal while it trains"),
    "env": ("ktrainer.cli.env_command", "show what is installed here, and which backends can run"),
    "horovod build": (
        "ktrainer.cli.horovod_command",
        "build Horovod for the installed TensorFlow, and keep the wheel",
    ),
}
_READ_LATER_OPTIONS = ("plan", "sweep")  # those after the script, too
_SEPARATOR = "\0"  # in place of a `--` while words are parsed; no word can be it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: the words after `ktrainer`; None takes those of this process.

    Returns:
        The exit status: the sub-command's, 2 for a mistake in its use, 130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"ktrainer {_version()}")
        return 0
    name = next((n for n in COMMANDS if words[: n.count(" ") + 1] == n.split()), None)
    if name is None:
        return _unknown(words)
    return _run(name, words[name.count(" ") + 1 :])


def _run(name: str, words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"ktrainer {name}", allow_abbrev=False)
    try:
        module = import_module(COMMANDS[name][0])
        module.add_arguments(parser)
        if name == "config":
            args = parser.parse_intermixed_args(words)
        else:
            args = parse_words(parser, words)
        if name not in _READ_LATER_OPTIONS:
            _refuse_later_options(parser, args)
        return int(module.run(args))
    except KtrainerError as error:
        print(f"ktrainer {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Output is closed, as in `ktrainer config | head`: keep Python from reporting it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The words of a command that has added its arguments. A script's `args` keep the `--`, which
    argparse drops where it follows the script at once."""
    if parser.get_default("args") is None or "--" not in words:
        return parser.parse_args(words)
    end = words.index("--")
    marked = [*words[:end], _SEPARATOR, *words[end + 1 :]]
    args = parser.parse_args(marked)
    if _SEPARATOR not in args.args:  # before the script it ends the options
        return parser.parse_args(words)
    args.args = ["--" if word == _SEPARATOR else word for word in args.args]
    return args


def _refuse_later_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options of the command among the script's words, where they would have no effect.

    Raises:
        ConfigError: naming the first one before `--`.
    """
    words = getattr(args, "args", [])
    if not getattr(args, "check", True):  # all words are the script's
        return
    known = parser._option_string_actions.keys() - {"-h", "--help"}
    for word in words[: words.index("--")] if "--" in words else words:
        name = word[:2] if word[2:].isdigit() else word.partition("=")[0]  # -n2, --ranks=2
        if name in known:
            raise ConfigError(
                f"{name} follows the script, but is an option of {parser.prog}: write it before "
                "the script. If the script has an option of that name, write that last, after a "
                "-- that follows the script and all key=value."
            )


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ktrainer COMMAND ...",
            "",
            "Train Keras 3 models on TensorFlow, in one process or in many.",
            "",
            *lines,
            "",
            "ktrainer COMMAND --help says more. ktrainer --version prints the version.",
        ]
    )


def _unknown(words: list[str]) -> int:
    groups = {n.split()[0]: n for n in COMMANDS if " " in n}
    if words[0] in groups:
        print(f"usage: ktrainer {groups[words[0]]} ...", file=sys.stderr)
        return 0 if words[1:2] in (["-h"], ["--help"]) else 2
    near = nearest(words[0], [n.split()[0] for n in COMMANDS])
    hint = f" Did you mean {near!r}?" if near else ""
    print(f"ktrainer: error: unknown command {words[0]!r}.{hint}\n\n{_usage()}", file=sys.stderr)
    return 2


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ktrainer")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
