"""`ktrainer report`: a page about runs: their curves, what happened, where they differ."""

from __future__ import annotations

import argparse
import webbrowser
from importlib.util import find_spec
from pathlib import Path

from ktrainer import __version__
from ktrainer.errors import ConfigError, SetupError
from ktrainer.runs.report_page import report_page
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.garbage_collection import paused_collection
from ktrainer.runtime.private_file import write_private

_DEFAULT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer report`."""
    parser.description = (
        "Write one HTML page about a run, finished or not, or about several, laid over each "
        "other: curves of all metrics, checkpoints, interruptions, losses of ranks and restarts, "
        "where the time went, what differs, versions and settings. The page loads nothing and "
        "sends nothing; it can be opened anywhere."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to write the page (default: {_DEFAULT} in the folder of the first run)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="also draw the main curves, for a README; needs matplotlib",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    if args.png is not None and find_spec("matplotlib") is None:
        raise SetupError(
            f"--png {args.png}: a PNG needs matplotlib, which is not installed: "
            "`pip install matplotlib`. The page itself needs nothing."
        )
    with paused_collection():  # a long record has millions of objects, and no garbage
        records = [RunRecord(Path(path)) for path in args.runs]
        page = report_page(records, __version__)
    output = args.output or records[0].folder / _DEFAULT
    try:
        write_private(output, page)
    except OSError as error:
        raise _cannot_write(output, error) from None
    print(f"report: {output}")
    if args.png is not None:
        from ktrainer.runs.report_picture import draw_picture

        try:
            draw_picture(records, args.png)
        except OSError as error:
            raise _cannot_write(args.png, error, "--png") from None
        print(f"picture: {args.png}")
    if args.open and not webbrowser.open(output.absolute().as_uri()):
        raise SetupError(f"there is no browser to open {output} with. Open it by hand.")
    return 0


def _cannot_write(path: Path, error: OSError, option: str = "--output") -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"{path} cannot be written: {reason}. Name another place by {option} FILE.")
