"""The command line of a script: `--config FILE` and `key=value`."""

from __future__ import annotations

from collections.abc import Sequence

from ktrainer.errors import ConfigError


def parse_cli(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file and the overrides in `argv` (without the program's name).

    `--help` prints the keys and ends the program.

    Returns:
        (path of the file or None, words `key=value`), for `load_config`.

    Raises:
        ConfigError: for any other word. A script with options of its own parses them first and
            hands on the rest: `own, rest = parser.parse_known_args()`.
    """
    path, overrides, rest = parse_known_cli(argv)
    if "--help" in rest or "-h" in rest:
        from ktrainer.config.docs import describe

        print("usage: [--config FILE] [key=value ...]\n\n" + describe())
        raise SystemExit(0)
    if rest:
        raise _unexpected(rest[0])
    return path, overrides


def parse_known_cli(argv: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Like `parse_cli`, but what it does not know comes back untouched as a third part.

    An option of the script's own whose value holds a `=` is best written as one word,
    `--option=a=b`: a free-standing `a=b` is taken for an override. All after `--` is rest.
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
    from ktrainer.config.schematree import lookup, suggest

    key = name.replace("-", "_")
    near = key if lookup(key) else suggest(key)
    if near and lookup(near):
        message = f"unknown option {word!r}: keys have no dashes, write {near}={value or 'VALUE'}"
    else:
        message = f"unknown option {word!r}: known are --config FILE and key=value"
    message += (
        ". An option of the script's own must be parsed before: own, rest = "
        "parser.parse_known_args(), then Trainer.from_cli(rest)."
    )
    return ConfigError(message, value=word)
