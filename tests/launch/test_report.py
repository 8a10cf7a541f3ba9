"""Which rank is to blame."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from ktrainer.launch.exit_report import conclude
from ktrainer.launch.failure_report import first_failure, others
from ktrainer.launch.group_state import GroupEnd
from ktrainer.launch.rank_channel import (
    Note,
    Options,
    decode,
    encode,
    open_pipe,
    pipe_path,
    prepare,
)

SIGNALLED = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 12743 on node here exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
DAEMON = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-9047@0,0] on node node1
  Remote daemon: [prterun-node1-9047@0,1] on node node2
"""
EXITED = """\
   Process name: [prterun-here-12759@1,2]
   Exit code:    3
"""


def failed(time: float, *, follows: bool = False, kind: str = "builtins.ValueError") -> Note:
    return Note("failed", 1, time, 1, kind, f"Traceback\n{kind}: at {time}\n", follows)


def test_notes_survive_the_pipe() -> None:
    note = failed(1.5)
    assert decode(encode(note)) == note


def test_a_pipe_that_is_not_read_any_more_is_not_waited_for(tmp_path: Path) -> None:
    prepare(tmp_path, 1, Options())
    path = pipe_path(tmp_path, 0, "notes")
    with pytest.raises(SystemExit, match=r"does not read 0\.notes of this process"):
        open_pipe(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    opened = open_pipe(path)
    assert os.get_blocking(opened)
    assert os.write(opened, b"note") == len(os.read(reader, 9))
    os.close(opened)
    os.close(reader)


def test_earliest_error_that_is_no_consequence_is_first() -> None:
    lost = failed(1.0, follows=True, kind="ktrainer.errors.PeerLost")
    notes = {0: lost, 2: failed(2.0), 1: failed(3.0)}
    first = first_failure(notes, [0, 1, 2], 1, "", {})
    assert first is not None
    assert (first.rank, first.code, first.headline) == (2, 1, "rank 2 raised ValueError")
    assert others(notes, first) == [
        "rank 0 then failed too: ktrainer.errors.PeerLost: at 1.0",
        "rank 1 then failed too: builtins.ValueError: at 3.0",
    ]


def test_killed_rank_comes_before_those_that_lost_it() -> None:
    notes = {0: failed(1.0, follows=True)}
    first = first_failure(notes, [1], 137, SIGNALLED, {1: "the stack"})
    assert first is not None
    assert (first.rank, first.code, first.text) == (1, 137, "the stack")
    assert "signal 9 (SIGKILL" in first.headline


def test_what_all_that_are_left_say_is_said_once() -> None:
    kind = "ktrainer.errors.RanksLost"
    said = replace(failed(1.0, follows=True, kind=kind), code=75, text=f"Traceback\n{kind}: of 1\n")
    notes = {0: said, 2: said, 3: failed(0.5, follows=True)}
    first = first_failure(notes, [1], 1, SIGNALLED, {})
    assert first is not None
    assert (first.rank, first.code, first.headline, first.text) == (None, 75, "of 1", "")
    assert others(notes, first) == ["rank 3 then failed too: builtins.ValueError: at 0.5"]


def test_ranks_that_end_with_a_checkpoint_after_the_loss_of_a_host_have_the_last_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind = "ktrainer.errors.RanksLost"
    text = f"Traceback\n{kind}: saved in step-3\n"
    said = replace(failed(1.0, follows=True, kind=kind), code=75, text=text)
    end = GroupEnd(code=1, started=True, failures={0: said, 1: said}, lost={2: "b", 3: "b"})
    assert conclude(end, Namespace(ranks=4), heals=True) == 75
    assert capsys.readouterr().err == "ktrainer run: saved in step-3\n"
    end.failures = {0: failed(1.0, follows=True)}
    assert conclude(end, Namespace(ranks=4), heals=True) == 1
    assert "host b was lost" in capsys.readouterr().err.splitlines()[-1]


def test_rank_that_left_with_a_code_is_named() -> None:
    first = first_failure({}, [2, 0, 1], 3, EXITED, {})
    assert first is not None
    assert (first.rank, first.code, first.headline) == (2, 3, "rank 2 ended with exit code 3")


def test_without_mpiruns_word_the_first_to_fall_silent_is_named() -> None:
    first = first_failure({}, [1, 0], 139, "", {})
    assert first is not None
    assert (first.rank, first.code) == (1, 139)


def test_mpirun_that_started_no_rank_reports_itself() -> None:
    first = first_failure({}, [], 213, "no such file", {})
    assert first is not None
    assert (first.rank, first.code, first.text) == (None, 213, "no such file")


def test_no_failure() -> None:
    assert first_failure({}, [0, 1], 0, "", {}) is None


def test_the_loss_of_a_daemon_is_a_failure_although_mpirun_succeeds() -> None:
    for notes in ({}, {0: failed(1.0, follows=True)}):
        first = first_failure(notes, [1, 0], 0, DAEMON, {})
        assert first is not None
        assert (first.rank, first.code) == (None, 1)
        assert "daemon (prted) on host node2" in first.headline


def test_rank_that_left_before_the_end_of_mpi_is_named() -> None:
    said = (
        "prterun has exited due to process rank 1 with PID 16574 on node vm exiting\n"
        "improperly. There are three reasons this could occur:\n"
    )
    lost = failed(1.0, follows=True, kind="ktrainer.errors.PeerLost")
    first = first_failure({0: lost}, [1], 1, said, {})
    assert first is not None
    assert (first.rank, first.code) == (1, 1)
    assert "rank 1 left by os._exit" in first.headline


def test_ranks_that_heal_and_waited_in_vain_at_the_start_have_failed() -> None:
    late = GroupEnd(started=True, late="rank 0 waited 9 s for rank 1", absent=[1], ended={1})
    assert conclude(late, Namespace(ranks=2), heals=True) == 1
