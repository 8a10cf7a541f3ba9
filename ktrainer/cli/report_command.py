"""`ktrainer report`: a page about runs: their curves, what happened, where they differ."""

from __future__ import annotations

import argparse
import os
import secrets
import webbrowser
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ktrainer import __version__
from ktrainer.errors import ConfigError, SetupError
from ktrainer.runs.report_page import report_page
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.garbage_collection import paused_collection

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
    _write(output, page)
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


def _write(path: Path, text: str) -> None:
    """Write a file for its owner alone, as the record is; an older one stays until it is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError, option: str = "--output") -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"{path} cannot be written: {reason}. Name another place by {option} FILE.")
