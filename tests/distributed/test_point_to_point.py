"""Messages that threads send and take while others are in collectives."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer import distributed
from tests.launch.conftest import launch, script

__all__ = ["launch", "script"]


def _exchange(count: int, size: int) -> tuple[list[Any], int]:
    from ktrainer.distributed.mpi_communicator import Mailbox

    here: Any = distributed.current_world()
    mail, found = Mailbox(here), []

    def talk() -> None:
        for number in range(count):
            mail.send((number, np.full(size, here.rank)), (here.rank + 1) % here.size)
        end = time.monotonic() + 20
        while (len(found) < count or not mail.all_taken()) and time.monotonic() < end:
            found.extend(mail.take())
            time.sleep(0.001)

    thread = threading.Thread(target=talk)
    thread.start()
    total = sum(int(here.oob_allreduce(np.int64(1), "sum")) for _ in range(200))
    thread.join()
    mail.close()
    mail.close()
    return [(sender, number, int(values.sum())) for sender, (number, values) in found], total


LATE = """
import time
from ktrainer import distributed
from ktrainer.distributed.mpi_communicator import Mailbox
here = distributed.current_world()
here.barrier()
here.deadline = 1.0
if here.rank == 1:
    time.sleep(60)
Mailbox(here)
"""


def test_a_rank_that_does_not_make_its_own_is_named(
    launch: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], Path]
) -> None:
    done = launch("-n", 2, script(LATE))
    assert done.returncode == 1, done.stdout
    assert "rank 0 waited 1 s at step 0 in 'open a communicator'" in done.stderr
    assert "No answer from rank 1" in done.stderr


def test_all_that_is_sent_arrives_in_order_beside_collectives(ranks) -> None:
    size = 300_000  # too much to be sent before it is taken
    for rank, (found, total) in enumerate(ranks(3).run(_exchange, 5, size)):
        sender = (rank - 1) % 3
        assert found == [(sender, number, sender * size) for number in range(5)]
        assert total == 600
