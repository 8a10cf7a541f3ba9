"""`ktrainer plan SCRIPT_OR_CONFIG`: show what would run, or why it cannot."""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ktrainer.cli import plan_scaling
from ktrainer.cli.launch_config import split_words
from ktrainer.cli.launch_options import positive
from ktrainer.config.command_line import give_words
from ktrainer.errors import ConfigError, SetupError
from ktrainer.script import bootstrap, plain_script

if TYPE_CHECKING:
    from ktrainer.plan_report.planning_mode import PlanRequest

_CONFIGS = (".yaml", ".yml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer plan`."""
    parser.description = (
        "Say what a run would do, or why it cannot: processes, batches, and for a pipeline its "
        "stages, what goes between them, its schedule, memory and expected speed. A script is "
        "run in this one process up to its first fit; a configuration file is enough to "
        "see the schedule. Nothing is trained, and no other process is started. With --world, "
        "processes on this host or on --hosts measure some steps, and the plan is the step time of "
        "other numbers of processes, with its parts."
    )
    _add_options(parser)
    parser.add_argument("target", metavar="SCRIPT_OR_CONFIG", help="a Python script, or a YAML")
    parser.add_argument(
        "args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="key=value, the options above, and a script's own words",
    )


def run(args: argparse.Namespace) -> int:
    """Show the plan; return the exit status.

    Raises:
        ConfigError: the configuration cannot work, or the script does not call `fit`.
        SetupError: the picture's format needs something that is not installed.
    """
    own = argparse.ArgumentParser(prog="ktrainer plan", allow_abbrev=False, add_help=False)
    _add_options(own)
    end = args.args.index("--") if "--" in args.args else len(args.args)
    later, words = own.parse_known_args(args.args[:end])
    words += args.args[end:]
    scaling = {name: getattr(later, name) or getattr(args, name) for name in plan_scaling.OPTIONS}
    if scaling["world"] is None:
        plan_scaling.refuse_without_world(scaling)
    picture = later.picture or args.picture
    if picture is not None:
        _check_picture(picture)
    trace = later.trace or args.trace
    if trace is not None and not trace.is_file():
        raise ConfigError(f"--trace: there is no file {str(trace)!r}; trainer.profile writes it.")
    path = Path(args.target)
    if not path.is_file():
        raise ConfigError(f"there is no script or configuration {args.target!r}.")

    if scaling["world"] is not None:
        other = later.processes or args.processes or picture or trace
        return _run_scaling(path, words, scaling, other)
    from ktrainer.plan_report.planning_mode import PlanRequest

    request = PlanRequest(later.processes or args.processes, picture, trace)
    if path.suffix in _CONFIGS:
        return _show_config(path, words, request)
    if path.suffix != ".py":
        raise ConfigError(
            f"{path} is neither a Python script (.py) nor a configuration (.yaml, .yml)."
        )
    return _run_script(path, words, request)


def _run_scaling(path: Path, words: list[str], given: dict[str, str | None], other: object) -> int:
    if path.suffix != ".py":
        raise ConfigError(f"--world measures steps, which takes a script (.py): {path} is none.")
    if other:
        raise ConfigError(
            "--world says how many processes to plan for: leave out -n, --picture and --trace."
        )
    return plan_scaling.run(path, words, given)


def _add_options(parser: argparse.ArgumentParser) -> None:
    plan_scaling.add_options(parser)
    parser.add_argument(
        "-n",
        "--processes",
        type=positive(int),
        metavar="N",
        help="plan for N processes, or workers with parameter servers (default: "
        "backend.partitions for a pipeline, else 1)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw a pipeline's schedule: .svg, or .png where matplotlib is installed",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace of a pipeline's steps (trainer.profile): write a copy that has the planned "
        "actions beside the measured ones",
    )


def _check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything runs."""
    if path.suffix not in (".svg", ".png"):
        message = f"--picture: {str(path)!r} must end in .svg or .png."
        raise ConfigError(message, value=str(path))
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise SetupError(
            f"--picture {path}: PNG needs matplotlib, which is not installed: ask for "
            f"{path.with_suffix('.svg')}, which needs nothing, or `pip install matplotlib`."
        )
    if not path.parent.is_dir():
        raise SetupError(f"--picture {path}: there is no folder {str(path.parent)!r}.")


def _show_config(path: Path, words: list[str], request: PlanRequest) -> int:
    from ktrainer.config import load_config, parse_cli
    from ktrainer.plan_report.planning_mode import planning_for
    from ktrainer.plan_report.report import show_config

    more, overrides = parse_cli(words)
    if more is not None:
        raise ConfigError(f"give one configuration, not both {str(path)!r} and {more!r}.")
    with planning_for(request):
        show_config(load_config(path, overrides, on_unknown_callback=lambda error: None))
    return 0


def _run_script(path: Path, words: list[str], request: PlanRequest) -> int:
    """Run the script as one process of `ktrainer run` would, up to its first `fit`."""
    from ktrainer.plan_report.planning_mode import PlanPrinted, planning_for

    argv, folders = sys.argv, list(sys.path)
    given, own = split_words(words)
    give_words(given)
    sys.argv, sys.path[:] = [str(path), *own], [str(path.resolve().parent), *folders]
    try:
        with planning_for(request):
            if plain_script.is_plain(path.read_bytes()):
                bootstrap.install(0, None, horovod=False)
            runpy.run_path(str(path), run_name="__main__")
    except PlanPrinted:
        return 0
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        bootstrap.uninstall()
        give_words(())
        sys.argv, sys.path[:] = argv, folders
    raise ConfigError(
        f"{path} has ended without fit, so there is nothing to plan. Call fit at the top level or "
        'under `if __name__ == "__main__"`; a configuration file shows the schedule alone.'
    )
