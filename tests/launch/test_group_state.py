"""Which lost ranks end a launch that heals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ktrainer.distributed import launcher_events
from ktrainer.elastic.recovery_point import survivable_section
from ktrainer.launch.failure_report import missed_failure
from ktrainer.launch.group_state import HealingPhases
from ktrainer.launch.rank_channel import Note


def phase(number: int, *stable_ranks: int) -> Note:
    return Note("phase", number=number, stable_ranks=list(stable_ranks))


def test_ranks_are_missed_outside_of_healing_phases() -> None:
    phases = HealingPhases(first=2)
    assert phases.missed([]) is None
    assert phases.missed([1]) == 1  # before its first step
    for rank in (0, 1):
        phases.record(phase(1, rank))
    assert phases.missed([1, 0]) is None
    phases.record(phase(2, 0, 1))
    assert phases.missed([1]) == 1  # it cannot have said so itself
    phases.record(phase(1, 1))  # its pipe was read later
    assert phases.missed([1]) == 1
    phases.record(phase(3, 0, 1))
    assert phases.missed([1]) is None


def test_a_rank_lost_while_healing_is_not_missed() -> None:
    phases = HealingPhases(first=3)
    for rank in (0, 1, 2):
        phases.record(phase(1, rank))
    phases.record(phase(2, 0, 2))
    assert phases.missed([1]) is None
    assert phases.missed([1, 2, 0]) == 2


def test_ranks_that_joined_are_missed_after_training() -> None:
    phases = HealingPhases(first=2)
    assert phases.missed([2]) is None
    phases.record(phase(1, 2))
    assert phases.missed([2]) is None
    phases.record(phase(2, 0, 1, 2))
    assert phases.missed([2]) == 2


def test_an_error_of_its_own_comes_before_a_rank_that_is_missed() -> None:
    mine = Note("failed", 1, 2.0, 1, "builtins.ValueError", "Traceback\nValueError: x\n")
    lost = Note("failed", 1, 1.0, 1, "ktrainer.errors.PeerLost", "Traceback\n", follows=True)
    assert missed_failure({0: lost, 2: mine}, 1, {}).rank == 2
    first = missed_failure({0: lost}, 1, {1: "the stack"})
    assert (first.rank, first.code, first.text) == (1, 1, "the stack")
    assert "rank 1 was killed" in first.headline


def test_one_that_leaves_with_an_error_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining rank that fails while the others heal is not missed; the next phase counts on."""
    reported: list[int] = []
    monkeypatch.setattr(
        launcher_events, "listener", lambda event, **fields: reported.append(fields["number"])
    )
    world: Any = SimpleNamespace(phases=0, stable_rank=1, members=[])
    with pytest.raises(RuntimeError), survivable_section(world):
        raise RuntimeError
    with survivable_section(world):
        pass
    assert reported == [1, 3, 4]
