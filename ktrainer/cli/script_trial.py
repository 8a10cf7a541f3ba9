"""Run a script for a command that asks something of its first `fit`, without its output."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ktrainer.cli import run_command
from ktrainer.cli.main import parse_words
from ktrainer.errors import ConfigError


def run_script(
    command: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    has_answered: Callable[[], bool],
    unanswered: str,
    how: str = "",
) -> None:
    """Run a script as `ktrainer run` does; show its output only if it fails.

    Args:
        command: for messages: `ktrainer verify`.
        words: of `ktrainer run`.
        environment: variables with the request.
        has_answered: whether the script has left what was asked for.
        unanswered: what to do about a script that has not, though it has not failed.
        how: it runs, for the message of one that fails.

    Raises:
        ConfigError: it fails, or ends without an answer.
    """
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    run_command.add_arguments(parser)
    before = dict(os.environ)
    os.environ.update(environment)
    kept = io.BytesIO()
    try:
        with _output_kept(kept):
            code = run_command.run(parse_words(parser, words))
    finally:
        os.environ.clear()
        os.environ.update(before)
    if code == 0 and has_answered():
        return
    sys.stderr.write(kept.getvalue().decode(errors="replace"))
    if code == 0:
        raise ConfigError(
            f"the script has ended without calling fit, so there is nothing to {unanswered}"
        )
    when = f" when run {how}" if how else ""
    raise ConfigError(f"the script failed{when} (exit status {code}); see above.")


def launch_options(given: Mapping[str, object]) -> list[str]:
    """The options of `ktrainer run` for given values of `add_size_options`."""
    names = ("ranks", "workers", "servers", "threads", "timeout")
    words = [f"--{name}={given[name]}" for name in names if given.get(name) is not None]
    cluster = given.get("workers") is not None or given.get("servers") is not None
    return words if cluster or given.get("ranks") is not None else [*words, "--ranks=1"]


@contextlib.contextmanager
def _output_kept(kept: io.BytesIO) -> Iterator[None]:
    stream = io.TextIOWrapper(kept, encoding="utf-8", write_through=True)
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
    finally:
        stream.flush()
        stream.detach()
