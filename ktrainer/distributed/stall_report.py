"""Stall reports: when a wait has taken too long, ask all ranks what they are doing.

A rank that waits polls for such questions and answers with what it waits for, and at which step. A
rank that computes, has stopped, hangs or has failed does not answer, so it is the one to look at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from mpi4py import MPI

from ktrainer.distributed.mpi_progress import receive_any, send
from ktrainer.errors import name_ranks

POLL_SECONDS = 0.1  # how often a waiting rank looks for questions
ANSWER_SECONDS = 2.0  # how long to wait for answers, at most: the machine may be busy


class StallReport:
    """Questions and answers over a communicator that is used for nothing else.

    Args:
        comm: of all ranks.
        tag: of questions; answers have the next one. No other messages use the two.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int = 0) -> None:
        self.comm, self._ask_tag, self._answer_tag = comm, tag, tag + 1
        self._one_at_a_time = threading.Lock()
        self._asked = 0
        self._sent: list[MPI.Request] = []  # a dropped request may lose its message

    def answer(self, doing: str) -> None:
        """Answer the questions that have arrived, if any. Any thread may call this."""
        while question := receive_any(self.comm, self._ask_tag):
            _, (rank, number) = question
            mine = self.comm.rank, number, doing
            self._sent.append(send(self.comm, mine, rank, self._answer_tag))

    def ask(self, doing: str, seconds: float) -> dict[int, str]:
        """Ask what each other rank is doing; ranks that do not answer are absent from the result.

        Args:
            doing: what this one does: others may ask at the same time.
            seconds: how long to wait for answers, at most.
        """
        with self._one_at_a_time:
            return self._ask(doing, seconds)

    def _ask(self, doing: str, seconds: float) -> dict[int, str]:
        self._asked += 1
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        for rank in others:
            mine = self.comm.rank, self._asked
            self._sent.append(send(self.comm, mine, rank, self._ask_tag))
        answers: dict[int, str] = {}
        end = time.monotonic() + seconds
        while len(answers) < len(others) and time.monotonic() < end:
            self.answer(doing)
            while message := receive_any(self.comm, self._answer_tag):
                _, (rank, number, theirs) = message
                if number == self._asked:
                    answers[rank] = theirs
            time.sleep(0.01)
        return answers


def stall_message(size: int, rank: int, answers: Mapping[int, str]) -> str:
    """The answers as sentences for an error message, missing ranks first.

    Args:
        size: how many ranks there are.
        rank: the one that asked.
        answers: what each other rank said.
    """
    missing = silent_ranks(size, rank, answers)
    sentences = []
    if missing:
        sentences.append(
            f"No answer from {name_ranks(missing)}: stopped, failed, or busy (computing, in "
            "Horovod)."
        )
    for doing in sorted(set(answers.values())):
        said = [r for r in sorted(answers) if answers[r] == doing]
        sentences.append(f"Waiting {doing}: {name_ranks(said)}.")
    return " ".join(sentences)


def silent_ranks(size: int, rank: int, answers: Mapping[int, str]) -> list[int]:
    """The ranks that have not answered `rank`."""
    return [r for r in range(size) if r != rank and r not in answers]
