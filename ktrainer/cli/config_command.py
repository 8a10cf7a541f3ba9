"""`ktrainer config`: print the configuration of a run, or the reference of its keys."""

from __future__ import annotations

import argparse
import sys

from ktrainer.config.config_loading import load_config
from ktrainer.config.key_reference import (
    describe,
    diff_yaml,
    reference_markdown,
    resolved_yaml,
)
from ktrainer.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer config`."""
    parser.description = (
        "Print the configuration that a run would use: the defaults, then the file, then "
        "key=value, with what each key does. Secrets are shown as ***."
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes on top of it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--describe",
        nargs="?",
        const="",
        metavar="KEY",
        help="print the reference of all keys, or of one key or group, and nothing else",
    )
    what.add_argument(
        "--reference", action="store_true", help="print the reference of all keys as Markdown"
    )
    what.add_argument("--diff", action="store_true", help="print what differs from the defaults")
    parser.add_argument("--no-comments", action="store_true", help="print keys and values alone")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    if args.describe is not None:
        print(describe(args.describe or None), end="")
        return 0
    if args.reference:
        print(reference_markdown(), end="")
        return 0
    config = load_config(args.config, args.overrides, on_unknown_callback=_warn)
    if args.diff:
        print(diff_yaml(config), end="")
    else:
        print(resolved_yaml(config, comments=not args.no_comments), end="")
    return 0


def _warn(error: ConfigError) -> None:
    """The script that registers the callback does not run here, so this is no error."""
    print(f"ktrainer: warning: {error}", file=sys.stderr)
