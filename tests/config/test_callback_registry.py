"""Callbacks by name, and nothing else."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ktrainer.config import callback_registry
from ktrainer.config.key_reference import describe
from ktrainer.errors import ConfigError


class Seen:
    """A callback, as far as the registry cares."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def on_train_begin(self, logs=None) -> None:
        pass


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(callback_registry, "_registered", {})


def test_register_and_build():
    assert callback_registry.register("seen_it")(Seen) is Seen
    made = callback_registry.build({"type": "seen_it", "size": 3})
    assert (type(made), made.size) == (Seen, 3)
    assert callback_registry.build("SeenIt").size == 1
    assert "seen_it" in callback_registry.names()
    with pytest.raises(ConfigError, match="Did you mean 'seen_it'"):
        callback_registry.check("seen_i")


def test_all_names_are_written_where_a_user_looks():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "callbacks.md"
    for text in (guide.read_text(), describe("callbacks")):
        words = set(re.findall(r"\w+", text))
        assert set(callback_registry._BUILT_IN) <= words


def test_functions_can_be_registered():
    callback_registry.register("made")(lambda size=2: Seen(size))
    assert callback_registry.build("made").size == 2


def test_a_name_is_taken_once():
    callback_registry.register("mine")(Seen)
    callback_registry.register("mine")(Seen)  # the same again, as when a notebook cell runs twice
    with pytest.raises(ConfigError, match="registered already"):
        callback_registry.register("mine")(dict)
    with pytest.raises(ConfigError, match="registered already"):
        callback_registry.register("early_stopping")(Seen)
    for name in ("", "a.b", "a:b"):
        with pytest.raises(ConfigError, match="dots"):
            callback_registry.register(name)


@pytest.mark.parametrize(
    "name", ["early_stopping", "EarlyStopping", "early-stopping", "loss_guard"]
)
def test_names_that_come_with_it(name):
    callback_registry.check({"type": name, "patience": 3})


def test_unknown_names_get_a_suggestion():
    with pytest.raises(
        callback_registry.UnknownCallback, match="Did you mean 'early_stopping'"
    ) as caught:
        callback_registry.check({"type": "early_stoping"}, path="callbacks.a")
    assert (caught.value.path, caught.value.value) == ("callbacks.a.type", "early_stoping")
    with pytest.raises(ConfigError, match="loss_guard"):
        callback_registry.check("qqqq")


@pytest.mark.parametrize("spec", [3, None, ["loss_guard"], {}, {"type": 3}, {"patience": 3}])
def test_malformed_specifications(spec):
    with pytest.raises(ConfigError, match="type: NAME"):
        callback_registry.check(spec)


HOSTILE = [
    "os.system", "os:system", "logging.os.system", "builtins.eval", "subprocess.Popen",
    "posix.system", "importlib.import_module", "ktrainer.config.callback_registry.build",
    "kt_trap.Trap", "kt_trap:os.system", "a..b", ".a", "a.", "a b.c",
    "kt_trap.__class__", "os.system()", "::",
]  # fmt: skip


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported."""
    (tmp_path / "kt_trap.py").write_text(
        "import os, subprocess\nfrom pathlib import Path\n"
        "Path(__file__).with_name('mark').touch()\n"
        "class Trap:\n    def on_train_begin(self, logs=None): pass\n"
        "class Plain:\n    def __init__(self): Path(__file__).with_name('called').touch()\n"
        "def function(): Path(__file__).with_name('called').touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("kt_trap", None)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("allow", [(), ("something_else",), ("kt_tra",), ("",)])
def test_import_paths_are_refused_without_importing(name, allow, trap, monkeypatch):
    monkeypatch.setattr(callback_registry, "import_module", pytest.fail)
    for use in (callback_registry.check, callback_registry.build):
        with pytest.raises(ConfigError):
            use({"type": name}, allow=allow)
    assert not (trap / "mark").exists()


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "builtins.eval"])
def test_the_standard_library_cannot_be_allowed(name):
    with pytest.raises(ConfigError, match="nothing was imported"):
        callback_registry.check(name, allow=["os", "subprocess", "builtins", name])


def test_allowed_import_paths(trap):
    callback_registry.check("kt_trap.Trap", allow=["kt_trap"])
    assert not (trap / "mark").exists()
    for name in ("kt_trap.Trap", "kt_trap:Trap"):
        assert type(callback_registry.build(name, allow=["kt_trap"])).__name__ == "Trap"
    assert callback_registry.build("kt_trap.Trap", allow=["kt_trap.Trap"])


@pytest.mark.parametrize("name", ["Plain", "function", "Path", "os", "missing"])
def test_an_allowed_module_gives_callbacks_alone(name, trap):
    with pytest.raises(ConfigError):
        callback_registry.build(f"kt_trap.{name}", allow=["kt_trap"])
    assert not (trap / "called").exists()


def test_what_an_allowed_module_imported_is_not_allowed(trap):
    with pytest.raises(ConfigError):
        callback_registry.build("kt_trap.os.system", allow=["kt_trap"])


def test_targets_are_not_read():
    with pytest.raises(ConfigError, match="_target_ is not read"):
        callback_registry.check({"type": "loss_guard", "_target_": "os.system"})
    callback_registry.register("kept")(lambda inner: Seen(inner))
    assert callback_registry.build({"type": "kept", "inner": {"_target_": "os.system"}}).size == {
        "_target_": "os.system"
    }


def test_arguments_that_do_not_fit_are_explained():
    callback_registry.register("seen")(Seen)
    with pytest.raises(ConfigError, match="colour"):
        callback_registry.build({"type": "seen", "colour": 1}, path="callbacks.a")
    callback_registry.register("no_callback")(dict)
    with pytest.raises(ConfigError, match="makes no callback but dict"):
        callback_registry.build("no_callback")


def test_entry_points(monkeypatch):
    point = EntryPoint("from_package", f"{__name__}:Seen", callback_registry.ENTRY_POINTS)
    monkeypatch.setattr(callback_registry, "entry_points", lambda group: [point])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    callback_registry.check("from_package")
    assert "from_package" in callback_registry.names()
    monkeypatch.setattr(EntryPoint, "load", lambda self: Seen)
    assert callback_registry.build({"type": "from_package", "size": 5}).size == 5


@pytest.mark.parametrize(
    "target", [t for t in callback_registry._BUILT_IN.values() if "ktrainer" in t]
)
def test_our_own_callbacks_are_where_the_table_says(target):
    module, _, name = target.partition(":")
    source = (
        Path(callback_registry.__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    )
    assert f"class {name}(" in source.read_text()
