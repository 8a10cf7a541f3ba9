"""The words of a sweep: what follows the script, checked, and what `ktrainer run` gets of them."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktrainer.cli.launch_config import checked_config, naming_the_separator
from ktrainer.cli.launch_options import process_count
from ktrainer.cli.script_trial import launch_options
from ktrainer.config import parse_known_cli
from ktrainer.config.config_sources import read_overrides
from ktrainer.config.redact import REDACTED, is_secret_name, redact, redact_text
from ktrainer.errors import ConfigError
from ktrainer.tuning.search_space import Space, Value, grid_size, split_spaces, word

_OWN = ("run", "run.dir", "checkpoint.dir", "checkpoint.resume")


@dataclass(frozen=True)
class SweepWords:
    """The words of a sweep: what it runs, and their spaces.

    Attributes:
        options: of `ktrainer run`.
        script: a Python file.
        spaces: the keys that change.
        fixed: words `key=value` of all trials.
        config: a file of keys; None: there is none.
        own: the script's own words.
        ranks, workers: how many processes there are, for checks.
    """

    options: tuple[str, ...]
    script: str
    spaces: tuple[Space, ...]
    fixed: tuple[str, ...]
    config: str | None
    own: tuple[str, ...]
    ranks: int
    workers: int | None

    @classmethod
    def read(cls, args: argparse.Namespace) -> SweepWords:
        """The words of a command line.

        Raises:
            ConfigError: a space cannot be read, or there is none.
        """
        config, words, own = parse_known_cli(args.args)
        spaces, fixed = split_spaces(words)
        for key in [*(space.key for space in spaces), *(each.partition("=")[0] for each in fixed)]:
            if key.strip() in _OWN:
                raise ConfigError("is the sweep's: each trial has a folder of its own.", path=key)
        if not spaces:
            raise ConfigError(
                "no key has several values to try: write key=a,b,c, key=log(low,high), "
                "key=uniform(low,high) or key=int(low,high) after the script."
            )
        cluster = args.workers is not None or args.servers is not None
        return cls(
            tuple(launch_options(vars(args))),
            args.script,
            tuple(spaces),
            tuple(fixed),
            config,
            tuple(own),
            process_count(args),
            (args.workers or 1) if cluster else None,
        )

    def check(self) -> None:
        """Check the configuration of trials, with each value of a choice and both ends of the
        other spaces. Keys `user.*` are known to the script alone.

        Raises:
            ConfigError: a key is unknown, or a value cannot work.
        """
        first = {space.key: space.examples()[0] for space in self.spaces}
        self._check_one(first)
        for space in self.spaces:
            for value in space.examples()[1:]:
                self._check_one({**first, space.key: value})

    def _check_one(self, values: Mapping[str, Value]) -> None:
        words = [*self.fixed, *self.of_trial(values)]
        if self.config is not None:
            words.append(f"--config={self.config}")
        with naming_the_separator(words):
            config = checked_config(self.script, words, self.ranks, self.workers, {})
        if config is not None and config.trainer.fast_dev_run:
            raise ConfigError(
                "keeps no record of a run, so trials could not be compared: leave it out, or try "
                "one run of the script with it.",
                path="trainer.fast_dev_run",
            )

    def hint(self, sampler: str, trials: int) -> str:
        """A note on the number of trials; empty if there is none."""
        try:
            count = grid_size(self.spaces)
        except ConfigError:  # of real numbers
            return ""
        if sampler == "grid" and trials < count:
            return f"{trials} of {count} combinations are tried: --trials {count} tries all"
        if sampler != "grid" and trials > count:
            return (
                f"there are {count} combinations for {trials} trials, so some are tried again: "
                "--sampler grid tries each once"
            )
        return ""

    def of_trial(self, values: Mapping[str, Value]) -> list[str]:
        """The words `key=value` of a trial."""
        return [word(space.key, values[space.key]) for space in self.spaces]

    def launch(self, values: Mapping[str, Value]) -> list[str]:
        """The words of `ktrainer run` for a trial."""
        config = [] if self.config is None else [f"--config={self.config}"]
        own = ["--", *self.own] if self.own else []
        return [*self.options, self.script, *self.fixed, *self.of_trial(values), *config, *own]

    def command(self, values: Mapping[str, Value]) -> str:
        """The command that trains with the values of a trial, secrets redacted."""
        return "ktrainer run " + shlex.join(map(_redacted, self.launch(values)))

    def redacted(self) -> list[str]:
        """All that follows the script, in one order, without secrets."""
        config = [] if self.config is None else [f"--config={self.config}"]
        spaces = [f"{space.key}={_shown(space)}" for space in self.spaces]
        return [*map(_redacted, sorted(self.fixed)), *spaces, *map(_redacted, [*config, *self.own])]

    def digest(self) -> str:
        """A digest of all words but the name of the file, by which other secrets are noticed."""
        spaces = [f"{space.key}={space}" for space in self.spaces]
        return _digest("\0".join([*sorted(self.fixed), *spaces, *self.own]).encode())


def file_digest(path: str) -> str:
    """A digest of a file's content, by which a change is noticed."""
    return _digest(Path(path).read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def _shown(space: Space) -> str:
    """The values of a space, secrets redacted."""
    words = [_redacted(word(space.key, choice)) for choice in space.choices]
    return ",".join(each.partition("=")[2] for each in words) or str(space)


def _redacted(each: str) -> str:
    """A word, its value redacted where `redact` does that to what YAML reads."""
    key, equals, text = each.partition("=")
    if not equals or not any(map(is_secret_name, key.split("."))):
        return redact_text(each)
    try:
        [(_, value, _)] = read_overrides([f"value={text}"])
    except ConfigError:  # of a word of the script's own
        value = text
    for part in reversed(key.split(".")):
        value = {part: value}
    return each if redact(value) == value else f"{key}={REDACTED}"
