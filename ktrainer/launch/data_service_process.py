"""One dispatcher or worker of a tf.data service, started by `ktrainer data-service`.

    python -m ktrainer.launch.data_service_process dispatcher PORT ADDRESS WORK_DIR
    python -m ktrainer.launch.data_service_process worker PORT ADDRESS DISPATCHER

WORK_DIR is empty for a dispatcher that forgets its jobs when it fails. TensorFlow listens on all
interfaces; its socket is moved to ADDRESS, which is one of this host.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading

from ktrainer.distributed.listening_sockets import keep_at
from ktrainer.launch.orphan_prevention import end_with_parent

HEARTBEAT_MS = 500


def main(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    import tensorflow as tf

    service = tf.data.experimental.service
    tf.config.set_visible_devices([], "GPU")
    role, port, address, rest = argv
    if role == "dispatcher":
        work_dir = rest
        server = service.DispatchServer(
            service.DispatcherConfig(
                port=int(port), work_dir=work_dir or None, fault_tolerant_mode=bool(work_dir)
            )
        )
    else:
        dispatcher = rest
        _wait_for(dispatcher, ended)
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=dispatcher,
                worker_address=f"{address}:{port}",
                port=int(port),
                heartbeat_interval_ms=HEARTBEAT_MS,
            )
        )
    if not keep_at(address, (int(port),)):
        print(f"listens on all interfaces: port {port} cannot be kept at {address}", flush=True)
    while not ended.wait(0.5):
        pass
    server._stop()


def _wait_for(address: str, ended: threading.Event) -> None:
    """Return once a dispatcher listens: a worker cannot be made before."""
    host, _, port = address.rpartition(":")
    while not ended.wait(0.1):
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 1.0).close()
            break


if __name__ == "__main__":
    main(sys.argv[1:])
