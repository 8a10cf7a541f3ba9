"""TensorFlow's start-up messages stay off the screen, unless they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.dist.harness.group import ROOT


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.exhaustive
def test_nothing_is_said() -> None:
    code = "import ktrainer, keras; keras.ops.ones(2); print('done')"
    done = _run(code, TF_ENABLE_ONEDNN_OPTS="1")  # where TensorFlow uses it, it says so
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.exhaustive
def test_what_is_asked_for_is_said() -> None:
    code = "import ktrainer, tensorflow, os; os.write(2, b'heard')"
    assert _run(code, TF_CPP_MIN_LOG_LEVEL="0", TF_ENABLE_ONEDNN_OPTS="1").stderr != "heard"


LOUD = "Trainer({'logging': {'tensorflow': True, 'progress': 'none'}})"


@pytest.mark.exhaustive
def test_what_the_configuration_asks_for_is_said() -> None:
    code = f"from ktrainer import Trainer\n{LOUD}\nimport os; os.write(2, b'heard')"
    assert _run(code, TF_ENABLE_ONEDNN_OPTS="1").stderr != "heard"


@pytest.mark.exhaustive
def test_what_the_configuration_asks_for_too_late_is_a_warning() -> None:
    code = f"from ktrainer import Trainer\nimport keras\n{LOUD}"
    assert "before the configuration was known" in _run(code, TF_ENABLE_ONEDNN_OPTS="1").stderr


def test_processes_begin_with_what_the_user_has_set() -> None:
    code = "import os; before = dict(os.environ); import ktrainer.runtime.tensorflow_logging\n"
    code += (
        "print(os.environ != before, ktrainer.runtime.tensorflow_logging.environment() == before)"
    )
    assert _run(f"import os; os.environ.pop('KERAS_BACKEND', None)\n{code}").stdout == "True True\n"
    assert _run(code, TF_CPP_MIN_LOG_LEVEL="0", KERAS_BACKEND="tensorflow").stdout == "False True\n"


def test_an_error_while_it_is_imported_is_not_lost(tmp_path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('broken')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ktrainer\n"
    code += "try: import tensorflow\nexcept RuntimeError as error: print(error)"
    assert _run(code).stdout == "broken\n"
