"""`ktrainer lr-find SCRIPT key=value ...`: find a learning rate by a range test."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ktrainer.cli.launch_options import add_script, add_size_options, positive
from ktrainer.cli.script_trial import launch_options, run_script
from ktrainer.errors import ConfigError
from ktrainer.launch.launch_folders import private_folder
from ktrainer.tuning.range_test_mode import RangeTest
from ktrainer.tuning.rate_suggestion import RateCurve, draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer lr-find`."""
    parser.description = (
        "Train with a learning rate that rises with every update (Smith, 2017: the learning-rate "
        "range test), in the script's first fit, and suggest the rate at which the loss falls "
        "fastest. The optimizer's own rate and schedule are not used, nor callbacks, but for those "
        "that change gradients. It ends when the loss diverges; the script ends after it, and no "
        "files of the run are kept."
    )
    add_size_options(parser)
    rate = positive(float)
    parser.add_argument("--min", type=rate, default=1e-6, help="the first rate (default: 1e-6)")
    parser.add_argument("--max", type=rate, default=10.0, help="the last rate (default: 10)")
    parser.add_argument(
        "--updates", type=positive(int), default=100, help="how many, at least 20 (default: 100)"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="where to draw the curve, as SVG (default: lr-find.svg)",
    )
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Test the rates, print the curve and the suggestion, and draw them; return the exit status.

    Raises:
        ConfigError: the options contradict each other, or the script does not train.
    """
    if args.min >= args.max:
        raise ConfigError(f"--min={args.min:g} must be below --max={args.max:g}.")
    if args.updates < 20:
        raise ConfigError(f"--updates={args.updates} are too few for a curve: give at least 20.")
    picture = args.picture or Path("lr-find.svg")
    if picture.suffix != ".svg":
        raise ConfigError(f"the picture is drawn as SVG: name it {picture.with_suffix('.svg')}.")
    if not os.access(picture.parent, os.W_OK):
        raise ConfigError(f"--picture {picture}: its folder is missing or cannot be written.")
    with private_folder() as name:
        test = RangeTest(name, args.min, args.max, args.updates)
        words = [*launch_options(vars(args)), args.script, *args.args]
        run_script(
            "ktrainer lr-find",
            words,
            test.to_environment(),
            test.result.exists,
            'measure: call it at the top level or under `if __name__ == "__main__"`.',
        )
        curve = RateCurve.read(test.result)
    print(curve.report())
    try:
        draw(curve, picture)
    except OSError as error:
        raise ConfigError(f"{picture} cannot be written: {error.strerror or error}.") from None
    print(f"picture: {picture}")
    return 0
