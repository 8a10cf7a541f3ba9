"""Warnings and log records are noted, and shown as without that."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest

from ktrainer.state.warning_log import (
    LONGEST,
    MOST,
    NotedWarning,
    WarningLog,
    on_one_line,
    warnings_noted,
)
from tests.processes import python


def texts(log: WarningLog) -> list[tuple[str, str]]:
    return [each.key for each in log.take()]


def test_each_is_noted_once_with_the_step_at_which_it_came() -> None:
    log, steps = WarningLog(), iter(range(10))

    def warn() -> None:
        with warnings_noted(log, lambda: next(steps)):
            for _ in range(2):
                warnings.warn("odd\n  rows", stacklevel=1)
                logging.getLogger("reader").error("slow %s", "disk")
            logging.getLogger("reader").info("quiet")

    with pytest.warns(UserWarning, match="odd"):
        warn()
    first, second = log.take()
    assert first == NotedWarning(0, "UserWarning", "odd\n  rows", first.where)
    assert second == NotedWarning(1, "reader", "slow disk", second.where)
    assert first.where.startswith("test_warning_log.py:")
    assert second.where.startswith("test_warning_log.py:")
    assert log.take() == []
    logging.getLogger("reader").warning("after it")
    assert not log.has_new


def test_what_a_script_catches_is_not_noted() -> None:
    log = WarningLog()
    with warnings_noted(log, int):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("mine", stacklevel=1)
        with pytest.raises(UserWarning, match="an error"):  # as pytest makes of all
            warnings.warn("an error", stacklevel=1)
    assert [str(each.message) for each in caught] == ["mine"]
    assert texts(log) == []


class Unspeakable:
    def __str__(self) -> str:
        raise OSError


def test_a_text_that_fails_and_a_long_one() -> None:
    log = WarningLog()
    with warnings_noted(log, int):
        record = ("reader", logging.WARNING, "reader.py", 1, "%s", (Unspeakable(),), None)
        logging.getLogger("reader").makeRecord(*record)  # it fails where it is shown
        logging.getLogger("reader").warning("x " * 100_000)
    ((kind, text),) = texts(log)
    assert (kind, on_one_line(text)) == ("reader", ("x " * LONGEST)[:LONGEST] + " ...")
    assert on_one_line("two\n  lines") == "two lines"


def test_a_record_without_a_level_is_no_warning() -> None:
    """Such as a program makes of what another process sends, to fill it."""
    log = WarningLog()
    with warnings_noted(log, int):
        assert logging.makeLogRecord({"msg": "sent", "levelno": logging.ERROR}).msg == "sent"
    assert not log.has_new


def test_there_are_not_too_many() -> None:
    log = WarningLog()
    for number in range(3 * MOST):
        log.note(number, "UserWarning", f"row {number} is odd")
    log.add_from_ranks([[], [NotedWarning(1, "UserWarning", "one more", ranks=(1,))]])
    found = texts(log)
    assert found[:MOST] == [("UserWarning", f"row {n} is odd") for n in range(MOST)]
    assert found[MOST:] == [
        ("ktrainer", f"more than {MOST} different warnings: later ones are not recorded"),
        ("UserWarning", "one more"),  # that of a rank with few
    ]


def test_those_of_other_ranks() -> None:
    log, odd = WarningLog(), NotedWarning(7, "UserWarning", "odd", "train.py:3")
    log.note(5, "UserWarning", "odd")
    assert len(log.take()) == 1
    other = NotedWarning(9, "reader", "slow disk")
    log.add_from_ranks([[], [odd, other], [NotedWarning(6, "UserWarning", "odd", "train.py:3")]])
    assert log.take() == [
        NotedWarning(6, "UserWarning", "odd", "train.py:3", ranks=(1, 2)),
        NotedWarning(9, "reader", "slow disk", ranks=(1,)),
    ]
    log.note(12, "reader", "slow disk")
    assert log.take() == [NotedWarning(12, "reader", "slow disk")]


def test_those_that_could_not_be_sent_come_first_the_next_time() -> None:
    log = WarningLog()
    log.note(1, "UserWarning", "odd")
    log.note(2, "UserWarning", "even")

    def send() -> None:
        with log.taking() as taken:
            assert [each.message for each in taken] == ["odd", "even"]
            log.note(3, "UserWarning", "late")
            raise OSError("a rank is lost")

    with pytest.raises(OSError, match="a rank is lost"):
        send()
    assert [each.message for each in log.take()] == ["odd", "even", "late"]


def test_a_fit_in_a_callback_has_its_own() -> None:
    outer, inner = WarningLog(), WarningLog()
    show, factory = warnings.showwarning, logging.getLogRecordFactory()
    with warnings_noted(outer, int):
        with warnings_noted(inner, int):
            logging.getLogger("reader").warning("inside")
        thread = threading.Thread(target=logging.getLogger("reader").warning, args=("outside",))
        thread.start()
        thread.join()
    assert (texts(inner), texts(outer)) == ([("reader", "inside")], [("reader", "outside")])
    assert (warnings.showwarning, logging.getLogRecordFactory()) == (show, factory)


SHOWN = """
import logging, sys, warnings
from contextlib import nullcontext
from ktrainer.state.warning_log import WarningLog, warnings_noted

log = WarningLog()
with warnings_noted(log, int) if "noted" in sys.argv else nullcontext():
    warnings.warn("odd rows")
    logging.getLogger("reader").warning("slow %s", "disk")  # by logging's handler of last resort
    logging.warning("the root's")  # which sets up a handler
    logging.getLogger("reader").warning("slow again")
    if "captured" in sys.argv:
        logging.captureWarnings(True)
        warnings.warn("captured")
print([each.kind for each in log.take()])
"""


@pytest.mark.parametrize("words", [[], ["captured"]])
def test_the_screen_shows_the_same(words: list[str]) -> None:
    without, noted = python("-c", SHOWN, *words), python("-c", SHOWN, *words, "noted")
    assert without.stderr == noted.stderr
    assert "slow disk" in noted.stderr
    kinds = ["UserWarning", "reader", "root", "reader", *["py.warnings"] * len(words)]
    assert noted.stdout == f"{kinds}\n"


def test_captured_before_it_is_noted_once() -> None:
    before = "logging.basicConfig()\nlogging.captureWarnings(True)\nlog = "
    done = python("-c", SHOWN.replace("log = ", before), "noted")
    assert "odd rows" in done.stderr
    assert done.stdout == f"{['UserWarning', 'reader', 'root', 'reader']}\n"
