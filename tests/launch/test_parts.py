"""Whose death ends a launch that heals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ktrainer import telling
from ktrainer.healing.parts import healing_part
from ktrainer.launch.channel import Note
from ktrainer.launch.parts import Parts
from ktrainer.launch.report import missed_failure


def part(number: int, *slots: int) -> Note:
    return Note("part", number=number, slots=list(slots))


def test_ranks_are_missed_but_where_deaths_are_healed() -> None:
    parts = Parts(first=2)
    assert parts.missed([]) is None
    assert parts.missed([1]) == 1  # before its first step
    for rank in (0, 1):
        parts.hear(part(1, rank))
    assert parts.missed([1, 0]) is None
    parts.hear(part(2, 0, 1))
    assert parts.missed([1]) == 1  # it cannot have said so itself
    parts.hear(part(1, 1))  # its pipe was read later
    assert parts.missed([1]) == 1
    parts.hear(part(3, 0, 1))
    assert parts.missed([1]) is None


def test_nobody_misses_who_was_gone_before() -> None:
    parts = Parts(first=3)
    for rank in (0, 1, 2):
        parts.hear(part(1, rank))
    parts.hear(part(2, 0, 2))
    assert parts.missed([1]) is None
    assert parts.missed([1, 2, 0]) == 2


def test_newcomers_are_missed_once_they_have_joined_and_training_is_over() -> None:
    parts = Parts(first=2)
    assert parts.missed([2]) is None
    parts.hear(part(1, 2))
    assert parts.missed([2]) is None
    parts.hear(part(2, 0, 1, 2))
    assert parts.missed([2]) == 2


def test_an_error_of_its_own_comes_before_a_rank_that_is_missed() -> None:
    mine = Note("failed", 1, 2.0, 1, "builtins.ValueError", "Traceback\nValueError: x\n")
    lost = Note("failed", 1, 1.0, 1, "ktrainer.errors.PeerLost", "Traceback\n", follows=True)
    assert missed_failure({0: lost, 2: mine}, 1, {}).rank == 2
    first = missed_failure({0: lost}, 1, {1: "the stack"})
    assert (first.rank, first.code, first.text) == (1, 1, "the stack")
    assert "rank 1 was killed" in first.headline


def test_one_that_leaves_with_an_error_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that fails while the others heal is not missed; the next part counts on."""
    told: list[int] = []
    monkeypatch.setattr(telling, "listener", lambda event, **fields: told.append(fields["number"]))
    world: Any = SimpleNamespace(parts=0, slot=1, peers=[])
    with pytest.raises(RuntimeError), healing_part(world):
        raise RuntimeError
    with healing_part(world):
        pass
    assert told == [1, 3, 4]
