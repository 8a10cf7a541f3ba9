"""The command line of a script: `--config FILE` and `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktrainer.config.config_loading import load_config
from ktrainer.config.config_sources import read_source
from ktrainer.config.launch_environment import as_launched
from ktrainer.config.schema import Config
from ktrainer.errors import ConfigError

# The configuration words of `ktrainer run` (`key=value`, `--config FILE`), which come before those
# of `sys.argv`. Set in the process that runs the script, before it begins: an environment variable
# would be inherited by the script's child processes.
launcher_words: list[str] = []
# With which `ktrainer run` seeds a plain script; checkpoints keep it for a resume.
launcher_seed: int | None = None
_taken = False  # whether a Trainer of the script has them
_refusal: ConfigError | None = None  # of the script's Trainers, if none has them


def give_words(words: Sequence[str]) -> None:
    """Set the words of the launch, which no Trainer of the script has yet."""
    global _taken, _refusal
    launcher_words[:] = words
    _taken, _refusal = False, None


def take_words() -> list[str]:
    """The words of the launch, for a Trainer of the script that has them. Others may differ."""
    global _taken, _refusal
    _taken, _refusal = True, None
    return launcher_words


def parse_cli(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file and the overrides in `argv` (without the program's name).

    `--help` prints the keys and ends the program.

    Returns:
        (path of the file or None, words `key=value`), for `load_config`.

    Raises:
        ConfigError: for any other word. A script with options of its own parses them first and
            passes on the rest: `own, rest = parser.parse_known_args()`.
    """
    path, overrides, rest = parse_known_cli(argv)
    if "--help" in rest or "-h" in rest:
        from ktrainer.config.key_reference import describe

        print("usage: [--config FILE] [key=value ...]\n\n" + describe())
        raise SystemExit(0)
    if rest:
        raise _unexpected(rest[0])
    return path, overrides


def no_effect(word: str) -> str:
    """The message about a word that a script's Trainer does not have."""
    return (
        f"{word} has no effect: the script makes its Trainer without the command line's key=value. "
        "Make it by Trainer.from_cli(), whose `defaults` are the script's own values, before any "
        "other one trains."
    )


def compare_words(config: Config) -> None:
    """Compare a Trainer that the script makes without the words of the launch with them: it has
    them if they would not change it.

    Args:
        config: of the Trainer, as launched.
    """
    global _refusal
    if not launcher_words or _taken:
        return
    path, words = parse_cli(launcher_words)
    try:
        wanted = as_launched(load_config(path, words, defaults=read_source(config)))
    except ConfigError as error:
        _refusal = error
        return
    has, would_have = config.to_dict(), wanted.to_dict()
    for key in wanted._origins:
        origin = wanted.origin(key)
        if not origin or key == "world.threads":  # of which the launcher makes the environment
            continue
        if _value(would_have, key) != _value(has, key):
            word = f"--config={path}" if origin == path else key
            _refusal = ConfigError(f"{no_effect(word)} Or set it in the script, without the word.")
            return
    take_words()


def require_taken_words() -> None:
    """Refuse to train where the words of the launch have no effect.

    Raises:
        ConfigError: the script has made Trainers, and none has them.
    """
    if _refusal is not None:
        raise _refusal


def _value(values: Any, key: str) -> Any:
    """The value of a dotted key; None inside of a group that is not set."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def parse_known_cli(argv: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Like `parse_cli`, but unknown words are returned unchanged, as a third part.

    An option of the script's own whose value holds a `=` is best written as one word,
    `--option=a=b`: a separate word `a=b` is an override. All words after `--` are unknown.
    """
    path: str | None = None
    overrides: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest.extend(words)
        elif word == "--config" or word.startswith("--config="):
            given = word.partition("=")[2] if "=" in word else next(words, "")
            if not given or (given.startswith("-") and "=" not in word):
                raise ConfigError("--config needs the path of a file.", value=given or None)
            if path is not None:
                raise ConfigError(f"--config is given twice: {path!r} and {given!r}.", value=given)
            path = given
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            rest.append(word)
    return path, overrides, rest


def _unexpected(word: str) -> ConfigError:
    """The error for a word that is neither `--config` nor `key=value`."""
    name, _, value = word.lstrip("-").partition("=")
    if not word.startswith("-"):
        message = f"{word!r} is no override: write key=value, such as trainer.epochs=3."
        return ConfigError(message, value=word)
    from ktrainer.config.key_errors import lookup, suggest_key

    key = name.replace("-", "_")
    near = key if lookup(key) else suggest_key(key)
    if near and lookup(near):
        message = f"unknown option {word!r}: keys have no dashes, write {near}={value or 'VALUE'}"
    else:
        message = f"unknown option {word!r}: known are --config FILE and key=value"
    message += (
        ". An option of the script's own must be parsed before: own, rest = "
        "parser.parse_known_args(), then Trainer.from_cli(rest)."
    )
    return ConfigError(message, value=word)
