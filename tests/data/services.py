"""A tf.data service as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


class Service:
    """A running `ktrainer data-service`."""

    def __init__(self, path: Path, command: list[str]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
        )
        self.output = ""

    @classmethod
    @contextlib.contextmanager
    def submitted(cls, path: Path, command: list[str]) -> Iterator[Service]:
        """The service that a command starts, ended with it."""
        started = cls(path, command)
        try:
            yield started
        finally:
            if started.process.poll() is None:
                started.end()
            else:
                started.output = started.process.communicate()[0]

    def wait(self) -> None:
        end = time.monotonic() + 150
        while not self.path.exists():
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < end
            time.sleep(0.1)

    def servers(self, role: str) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [p for p in children if role in p.cmdline()]

    def kill(self, role: str) -> None:
        os.kill(self.servers(role)[0].pid, signal.SIGKILL)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.output = self.process.communicate(timeout=30)[0]
        return self.process.returncode


@contextlib.contextmanager
def service(folder: Path, *words: str, python: str = sys.executable) -> Iterator[Service]:
    """`ktrainer data-service --config folder/service.json words...`, once it is ready."""
    path = folder / "service.json"
    command = [python, "-m", "ktrainer.cli.main", "data-service", "--config", str(path)]
    with Service.submitted(path, [*command, *words]) as started:
        started.wait()
        yield started
