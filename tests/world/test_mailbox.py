"""Messages that threads send and take while others are in collectives."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from ktrainer import world


def _exchange(count: int, size: int) -> tuple[list[Any], int]:
    from ktrainer.world.mailbox import Mailbox

    here: Any = world.current()
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


def test_all_that_is_sent_arrives_in_order_beside_collectives(ranks) -> None:
    size = 300_000  # too much to be sent before it is taken
    for rank, (found, total) in enumerate(ranks(3).run(_exchange, 5, size)):
        sender = (rank - 1) % 3
        assert found == [(sender, number, sender * size) for number in range(5)]
        assert total == 600
