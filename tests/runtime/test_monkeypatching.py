"""Attributes are replaced for a while, and restored just as they were."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktrainer.runtime.monkeypatching import (
    Replacements,
    as_in_this_thread,
    entered_in_this_thread,
    replaced,
    replaced_in,
    wrap_import,
)


class Base:
    def inherited(self) -> str:
        return "original"


class Owner(Base):
    @staticmethod
    def static() -> str:
        return "original"

    @property
    def computed(self) -> str:
        return "original"


@pytest.mark.parametrize("name", ["static", "computed", "inherited"])
def test_a_class_is_as_it_was(name: str) -> None:
    before = dict(vars(Owner))
    with replaced((Owner, name, property(lambda self: "new"))):
        assert getattr(Owner(), name) == "new"
    assert dict(vars(Owner)) == before


def test_an_object_is_as_it_was() -> None:
    owner = Owner()
    with replaced((owner, "inherited", lambda: "new"), (owner, "inherited", lambda: "newer")):
        assert owner.inherited() == "newer"
    assert vars(owner) == {}
    assert owner.inherited() == "original"


def test_nothing_stays_replaced_when_an_owner_lacks_a_name() -> None:
    owner = SimpleNamespace(name="original")

    def replace_both() -> None:
        with Replacements() as replacing:
            replacing.set(owner, "name", "new")
            replacing.wrap(owner, "missing", lambda original: original)

    with pytest.raises(AttributeError, match="missing"):
        replace_both()
    assert vars(owner) == {"name": "original"}


def in_another_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_replacement_acts_where_its_scope_is_entered() -> None:
    owner = SimpleNamespace(name=lambda: "original")
    scope = object()
    with replaced_in(scope, [(owner, "name", lambda: "replacement")]):
        assert owner.name() == "original"
        with entered_in_this_thread(scope):
            assert owner.name() == "replacement"
            assert in_another_thread(lambda: owner.name()) == "original"
            assert in_another_thread(as_in_this_thread(lambda: owner.name())) == "replacement"
        assert owner.name() == "original"


def test_finders_without_find_spec_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.12 does."""

    class Around(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            return wrap_import(self, name, path, target, nullcontext) if name == "found" else None

    (tmp_path / "found.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    finder: Any = Around()
    monkeypatch.setattr(sys, "meta_path", [finder, SimpleNamespace(), *sys.meta_path])
    try:
        assert importlib.import_module("found").value == 3
    finally:
        sys.modules.pop("found", None)
    assert finder not in sys.meta_path
