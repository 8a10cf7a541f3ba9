"""Errors travel between processes as they are."""

from __future__ import annotations

import pickle
import sys

import pytest

from ktrainer.errors import ConfigError, DeadlineExceeded, nearest
from tests import processes


def test_errors_pickle_with_message_and_attributes() -> None:
    error = DeadlineExceeded(rank=1, step=7, operation="all-reduce", seconds=2.5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DeadlineExceeded
    assert str(again) == str(error)
    assert (again.rank, again.step, again.operation, again.seconds) == (1, 7, "all-reduce", 2.5)


def test_a_config_error_names_path_and_the_nearest_name() -> None:
    error = ConfigError(
        "no such engine.", path="backend.engine", value="mpy", known=["mpi", "auto"]
    )
    assert str(error) == "backend.engine: no such engine. Did you mean 'mpi'?"
    assert pickle.loads(pickle.dumps(error)).path == "backend.engine"


@pytest.mark.parametrize(("checkpoint", "code"), [("None", 130), ("'there'", 75)])
def test_an_interruption_by_ctrl_c_ends_a_program_with_its_code(checkpoint: str, code: int) -> None:
    text = f"from ktrainer.errors import *; raise InterruptedByKeyboard(2, 5, {checkpoint})"
    assert processes.run([sys.executable, "-c", text]).returncode == code


def test_nearest_gives_up_on_what_is_far_away() -> None:
    assert nearest("zebra", ["mpi", "horovod"]) is None
