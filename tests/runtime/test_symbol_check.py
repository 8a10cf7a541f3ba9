"""The table of private symbols is complete, and a version that differs from it is refused."""

from __future__ import annotations

import ast
import inspect
import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from ktrainer.errors import SetupError
from ktrainer.runtime import monkeypatching
from ktrainer.runtime.keras_symbols import SUPPORTED
from ktrainer.runtime.symbol_check import check_symbols, difference, symbols
from tests import small
from tests.dist.harness.group import ROOT

SYMBOLS = list(symbols())
PATHS = {symbol.path for symbol in SYMBOLS}
NAMES = {symbol.name for symbol in SYMBOLS} | {symbol.owner for symbol in SYMBOLS}
FOREIGN = ("keras.src", "tensorflow.python", "tensorflow.compiler")
PRIVATE = re.compile(r"_[a-z]\w*")
NOT_THEIRS = {
    "_exit", "_getframe", "_run_exitfuncs", "_error", "_option_string_actions",  # of Python's
    "_parents",  # of Grain's data sets; guarded, and tests/data/test_examples.py needs it
    "_storage", "_trial_id",  # of Optuna's, which pyproject.toml holds at one major version
    "_alone", "_by_root", "_initializing", "_class", "_target_", "_only_forward",  # ours, of files
}  # fmt: skip
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "ktrainer").rglob("*.py"))}


def package(path: Path) -> str:
    """`steps`, `pipeline`, `trainer`: as the table names it."""
    parts = path.relative_to(ROOT / "ktrainer").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return parts[0].removesuffix(".py")


def own_names() -> set[str]:
    """What the package itself defines."""
    found = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("_ktrainer"):
            found.add(node.value)
    return found


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes, strings and imported names, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)


def imported_symbols(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Dotted paths below private modules, with the attributes that are taken of them."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FOREIGN):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        text = ast.unparse(node)
        first, _, rest = text.partition(".")
        if text.startswith(FOREIGN):
            yield node.lineno, text
        elif first in modules and re.fullmatch(r"[\w.]+", rest):
            yield node.lineno, f"{modules[first]}.{rest}"


def is_listed(path: str) -> bool:
    """Whether a path, the class or module that it is in, or something in it, is in the table."""
    parts = path.split(".")
    begins = {".".join(parts[:count]) for count in range(4, len(parts) + 1)}
    return any(each.startswith(f"{path}.") for each in PATHS) or bool(begins & PATHS)


def test_every_use_of_a_private_module_is_listed() -> None:
    missing = [
        f"{path}:{line}: {symbol}"
        for path, tree in TREES.items()
        for line, symbol in imported_symbols(tree)
        if not is_listed(symbol)
    ]
    assert not missing, "\n".join(missing)


def test_every_private_name_is_listed_with_the_packages_that_use_it() -> None:
    users = defaultdict(set)
    for symbol in SYMBOLS:
        users[symbol.name].update(symbol.packages)
    unknown = NOT_THEIRS | own_names() - {"_direct_assign"}
    missing = [
        f"{path}:{line}: {name}"
        for path, tree in TREES.items()
        if path.name != "keras_symbols.py"
        for line, name in used_names(tree)
        if PRIVATE.fullmatch(name) and name not in unknown and package(path) not in users[name]
    ]
    assert not missing, "\n".join(missing)


def public_name(name: str) -> str:
    """`tf.random.stateless_uniform` is `stateless_random_uniform` where it is defined."""
    name = name.removesuffix("_v2")
    return name.removeprefix("random_").replace("stateless_random_", "stateless_")


def test_every_listed_name_is_used_where_the_table_says() -> None:
    used = defaultdict(set)
    for path, tree in TREES.items():
        for _, name in used_names(tree):
            used[package(path)].add(name)
    unused = [
        f"{package}: {symbol.path}"
        for symbol in SYMBOLS
        for package in symbol.packages
        if not {symbol.name, public_name(symbol.name), symbol.owner} & used[package]
    ]
    assert not unused, "\n".join(unused)


def test_everything_that_a_checked_step_replaces_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced = []
    original = monkeypatching.Replacements.set

    def set_(self: Any, owner: Any, name: str, value: Any) -> None:
        function = owner if inspect.ismodule(owner) else None
        replaced.append((owner, name, getattr(function, name, None)))
        original(self, owner, name, value)

    monkeypatch.setattr(monkeypatching.Replacements, "set", set_)
    with small.trainer(trainer__accumulate=2, health__verify="auto") as trainer:
        trainer.fit(small.build(), small.data())
    assert len(replaced) > 20
    missing = [(owner, name) for owner, name, value in replaced if not listed(owner, name, value)]
    assert not missing


def listed(owner: Any, name: str, function: Any) -> bool:
    if name.startswith(("assign", "scatter", "batch_scatter")) and issubclass(owner, tf.Variable):
        return True  # all that there are: see `verify.side_effects`
    if inspect.ismodule(owner):
        plain = inspect.unwrap(function)
        return f"{plain.__module__}.{plain.__name__}" in PATHS
    classes = owner.__mro__ if inspect.isclass(owner) else type(owner).__mro__
    ours = any(each.__module__.startswith("ktrainer.") for each in classes)
    return ours or any(f"{c.__module__}.{c.__qualname__}.{name}" in PATHS for c in classes)


def test_the_installed_versions_fit_in_under_10_ms() -> None:
    taken = []
    for _ in range(5):
        check_symbols.cache_clear()
        start = time.thread_time()
        check_symbols()
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.01


def other(values: Any, mask: Any = None) -> None: ...


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keras.src.losses.loss.reduce_weighted_values(values, mask) should be "
    "(values, sample_weight, mask, reduction, dtype)": lambda patch: patch.setattr(
        "keras.src.losses.loss.reduce_weighted_values", other
    ),
    "keras.src.layers.layer.Layer._flatten_layers is missing": lambda patch: patch.delattr(
        "keras.src.layers.layer.Layer._flatten_layers"
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_version_is_refused(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_symbols.cache_clear()
    CHANGES[message](monkeypatch)
    with pytest.raises(SetupError) as caught:
        small.trainer()
    assert message in str(caught.value)
    assert f"keras {keras.__version__}" in str(caught.value)
    assert all(f"{name}{bounds}" in str(caught.value) for name, bounds in SUPPORTED.items())


def test_an_attribute_of_objects_is_missed() -> None:
    symbol = next(s for s in SYMBOLS if s.inside and s.name == "_trainable_variables")
    assert difference(symbol) is None
    gone = symbol._replace(name="_trained")
    assert difference(gone) == f"{symbol.module}.BaseOptimizer._trained is missing"
    assert difference(gone._replace(optional=True)) is None


def test_a_wrapper_that_takes_anything_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.src.losses.loss.apply_mask", lambda *args, **kwargs: None)
    symbol = next(s for s in SYMBOLS if s.name == "apply_mask")
    assert difference(symbol) is None


def test_the_bounds_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"keras{SUPPORTED['keras']}" in project["dependencies"]
    assert project["optional-dependencies"]["cpu"] == [f"tensorflow-cpu{SUPPORTED['tensorflow']}"]
