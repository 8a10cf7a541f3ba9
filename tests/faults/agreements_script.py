"""Ranks that agree again and again, while another thread of each exchanges messages.

ktrainer run --heal -n 4 agreements_script.py
"""

from __future__ import annotations

import threading

from ktrainer.distributed import open_world
from ktrainer.distributed.mpi_communicator import Mailbox

TIMES = 10_000


def exchange(mailbox: Mailbox, sends: bool, ended: threading.Event) -> None:
    while not ended.is_set():
        if sends and mailbox.all_taken():
            mailbox.send("a message", 0)
        mailbox.take()


def main() -> None:
    world = open_world(60.0, heal=True)
    pair = world.group([world.rank % 2, world.rank % 2 + 2], "pair")
    mailbox, ended = Mailbox(pair), threading.Event()
    thread = threading.Thread(target=exchange, args=(mailbox, pair.rank == 1, ended))
    thread.start()
    try:
        for _ in range(TIMES):
            world.agree("that no rank is lost")
    finally:
        ended.set()
        thread.join()
    print("all agreed", flush=True)


if __name__ == "__main__":
    main()
