"""Compare the private symbols that we rely on with the installed Keras and TensorFlow."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any, NamedTuple

from ktrainer.errors import SetupError
from ktrainer.runtime.keras_symbols import SUPPORTED, TABLE


class Symbol(NamedTuple):
    """One entry of the table.

    Attributes:
        module: where it is.
        owner: the class, or function, that it is in; "" for one of the module's own.
        name: its own.
        parameters: those that we rely on, in order; None where it may be anything.
        inside: whether it is a name in the code of its owner, not an attribute of it.
        optional: whether it may be missing.
        packages: those that use it.
        why: what for.
    """

    module: str
    owner: str
    name: str
    parameters: str | None
    inside: bool
    optional: bool
    packages: tuple[str, ...]
    why: str

    @property
    def path(self) -> str:
        """The dotted path."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


def symbols() -> Iterator[Symbol]:
    """The entries of the table."""
    module, lines = "", iter(TABLE.strip().splitlines())
    for line in lines:
        if not line.startswith(" "):
            module = line
            continue
        packages, _, why = next(lines).strip().partition(": ")
        written = line.strip()
        optional, written = written.startswith("?"), written.removeprefix("?")
        owner, inside, names = written.partition("().")
        if inside:
            called: str | None = None
        else:
            path, bracket, parameters = written.partition("(")
            called = parameters.removesuffix(")") if bracket else None
            owner, _, names = path.rpartition(".")
        for name in names.split(", "):
            users = tuple(packages.split(", "))
            yield Symbol(module, owner, name, called, bool(inside), optional, users, why)


@functools.cache
def check_symbols() -> None:
    """Check that every private symbol is there, with the parameters that we rely on.

    Raises:
        SetupError: it names those that are not, and the supported versions.
    """
    differences = [found for symbol in symbols() if (found := difference(symbol))]
    if differences:
        raise SetupError(_refusal(differences))


def difference(symbol: Symbol) -> str | None:
    """How a symbol differs from what we rely on; None if it does not."""
    try:
        owner: Any = importlib.import_module(symbol.module)
        for name in filter(None, symbol.owner.split(".")):
            owner = getattr(owner, name)
        if symbol.inside:
            known = symbol.name in _names_inside(owner)
            return None if known or symbol.optional else f"{symbol.path} is missing"
        found = _parameters(getattr(owner, symbol.name))
    except (ImportError, AttributeError):
        return None if symbol.optional else f"{symbol.path} is missing"
    if symbol.parameters is None or found in (None, symbol.parameters):
        return None
    return f"{symbol.path}({found}) should be ({symbol.parameters})"


def _parameters(function: Any) -> str | None:
    """Names of the parameters in order; None where they cannot be told, or may be any."""
    if inspect.isclass(function):
        return None
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    starred = list(code.co_varnames[count : count + 2])
    if code.co_flags & inspect.CO_VARARGS:
        names.insert(code.co_argcount, f"*{starred.pop(0)}")
    if code.co_flags & inspect.CO_VARKEYWORDS:
        names.append(f"**{starred.pop(0)}")
    # Other packages, and a user's script, may have wrapped it.
    wrapped = code.co_flags & inspect.CO_VARARGS and code.co_flags & inspect.CO_VARKEYWORDS
    return None if wrapped else ", ".join(names)


@functools.cache
def _names_inside(owner: Any) -> frozenset[str]:
    """The names and strings in the code of a function, or of a class's functions."""
    functions = vars(owner).values() if inspect.isclass(owner) else [owner]
    plain = (inspect.unwrap(getattr(f, "fget", None) or f) for f in functions)
    codes = [f.__code__ for f in plain if isinstance(getattr(f, "__code__", None), CodeType)]
    found: set[str] = set()
    for code in codes:  # which grows by the functions inside
        found.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
        codes.extend(c for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(found)


def _refusal(differences: list[str]) -> str:
    installed = ", ".join(f"{name} {_version(name)}" for name in SUPPORTED)
    supported = ", ".join(f"{name}{bounds}" for name, bounds in SUPPORTED.items())
    listed = "\n  ".join(differences)
    return (
        f"ktrainer relies on parts of Keras and TensorFlow that have no public interface, and in "
        f"the installed versions ({installed}) these differ:\n  {listed}\n"
        f"Install supported ones: {supported}, for example by pip install "
        f"'keras{SUPPORTED['keras']}'."
    )


def _version(name: str) -> str:
    for package in (name, f"{name}-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"
