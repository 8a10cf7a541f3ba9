"""A pause of garbage collection changes nothing but time; in processes of their own, as test
workers have frozen what they have imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BEFORE = "import gc, weakref\nfrom ktrainer.runtime.garbage_collection import paused_collection\n"
_GARBAGE = """
class Cycle:
    def __init__(self):
        self.own = self

with paused_collection():
    lost = weakref.ref(Cycle())
    with paused_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()
    kept = Cycle()
assert gc.isenabled()
assert gc.get_freeze_count() == 0
later = weakref.ref(kept)
del kept
gc.collect()
assert lost() is None
assert later() is None
"""
_FROZEN = """
with paused_collection():
    with paused_collection(freeze=True):
        kept = Cycle()
assert gc.isenabled()
assert gc.get_freeze_count() > 0
later = weakref.ref(kept)
del kept
gc.collect()
assert later() is not None
gc.unfreeze()
try:
    with paused_collection(freeze=True):
        raise ImportError
except ImportError:
    assert gc.get_freeze_count() == 0
graph = [[] for _ in range(200_000)]
with paused_collection(freeze=True):
    pass
assert gc.get_freeze_count() == 0
"""
_ERROR = """
try:
    with paused_collection():
        raise ImportError
except ImportError:
    assert gc.isenabled()
"""
_USERS = """
gc.freeze()
frozen = gc.get_freeze_count()
with paused_collection():
    pass
assert gc.get_freeze_count() == frozen > 0
gc.disable()
with paused_collection():
    pass
assert not gc.isenabled()
"""


def _run(code: str, folder: Path) -> str:
    """The output of Python."""
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize(
    "code",
    [_GARBAGE, _GARBAGE + _FROZEN, _ERROR, _USERS],
    ids=["garbage", "frozen", "an error", "settings of the user's"],
)
def test_errors_and_nested_blocks_and_what_is_kept(code: str, tmp_path: Path) -> None:
    _run(_BEFORE + code, tmp_path)


@pytest.mark.parametrize(
    ("imports", "freezes"),
    [
        ("from ktrainer import load_config", False),
        (
            "from ktrainer.script import bootstrap; bootstrap.before_import(print); "
            "import tensorflow",
            True,
        ),
    ],
    ids=["ktrainer", "TensorFlow in a rank"],
)
def test_imports_collect_nothing(imports: str, freezes: bool, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("made = [[] for _ in range(10_000)]")
    code = "import gc, ktrainer, ktrainer.script.bootstrap; gc.set_threshold(10); found = []; "
    code += f"gc.callbacks.append(lambda *of: found.append(of)); {imports}; "
    code += "gc.callbacks.clear(); print(len(found), gc.get_freeze_count())"
    collections, frozen = map(int, _run(code, tmp_path).split("\n")[-2].split())
    assert collections < 20  # around the import itself, where a few objects are made
    assert frozen > 10_000 if freezes else frozen == 0


def test_other_imports_in_a_rank_freeze_nothing(tmp_path: Path) -> None:
    """A script may have models before it imports them."""
    code = "import gc; from ktrainer.script import bootstrap; bootstrap.install(0, 1, False); "
    assert _run(code + "import numpy; print(gc.get_freeze_count())", tmp_path) == "0\n"
