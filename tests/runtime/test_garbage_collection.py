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
_TENSORFLOW = """
import sys
with paused_collection():
    sys.modules["tensorflow"] = kept = Cycle()
frozen = gc.get_freeze_count()
assert frozen > 0
later = weakref.ref(kept)
del kept, sys.modules["tensorflow"]
gc.collect()
assert later() is not None
gc.unfreeze()
sys.modules["tensorflow"] = None
with paused_collection():
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
    [_GARBAGE, _GARBAGE + _TENSORFLOW, _ERROR, _USERS],
    ids=["garbage", "TensorFlow", "an error", "settings of the user's"],
)
def test_after_it_all_but_tensorflow_is_as_before(code: str, tmp_path: Path) -> None:
    _run(_BEFORE + code, tmp_path)


@pytest.mark.parametrize(
    "imports",
    [
        "from ktrainer import load_config",
        "from ktrainer.script import bootstrap; bootstrap.before_import(print); import tensorflow",
    ],
    ids=["ktrainer", "TensorFlow in a rank"],
)
def test_imports_collect_nothing(imports: str, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("made = [[] for _ in range(10_000)]")
    code = "import gc, ktrainer, ktrainer.script.bootstrap; gc.set_threshold(10); found = []; "
    code += f"gc.callbacks.append(lambda *of: found.append(of)); {imports}; "
    code += "gc.callbacks.clear(); print(len(found))"
    # Around the import itself, where a few objects are made.
    assert int(_run(code, tmp_path).split("\n")[-2]) < 20
