"""The file by which a tf.data service and a training job find each other. Imports no TensorFlow."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ktrainer.errors import ConfigError, DeadlineExceeded, SetupError

_POLL = 0.1
# How a client of HTTP/2, which gRPC speaks, begins: its preface and empty settings (RFC 9113, 3.4).
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@dataclass(frozen=True)
class TfDataServiceConfig:
    """A running tf.data service, as `ktrainer data-service` writes it to its file.

    Attributes:
        dispatchers: how many there are, or are to be in the training processes.
        workers_per_dispatcher: workers that compute for each.
        dispatcher_side: `compute`: they run beside the workers. `training`: training process `r`
            starts dispatcher `r`, in `data_service(config, r)`.
        addresses: `host:port` of each dispatcher on the compute side.
        token: differs from service to service.
        lost_workers: workers that have failed so far; the service rewrites its file then.
        timeout: seconds that each side waits for the other.
        path: the file that it was read from.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: Literal["compute", "training"] = "compute"
    addresses: tuple[str, ...] = ()
    token: str = ""
    lost_workers: int = 0
    timeout: float = 60.0
    path: str = ""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TfDataServiceConfig:
        """The inverse of `to_dict`."""
        return cls(**{**values, "addresses": tuple(values["addresses"])})

    def to_dict(self) -> dict[str, Any]:
        """All attributes but `path`, as JSON takes them."""
        values = {**asdict(self), "addresses": list(self.addresses)}
        del values["path"]
        return values

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write the file at once: a reader finds all of it or none."""
        write_json(Path(filename), self.to_dict())

    @classmethod
    def read(
        cls,
        filename: str | os.PathLike[str],
        wait_for_file_creation: bool = False,
        timeout: float = 60.0,
    ) -> TfDataServiceConfig:
        """Read the file of a service.

        Args:
            filename: as given to `ktrainer data-service --config`.
            wait_for_file_creation: wait until the service has written it, and its first dispatcher
                listens: a service that was killed leaves its file.
            timeout: seconds to wait.

        Raises:
            SetupError: there is no such file, and none is waited for; or it is of something else.
            DeadlineExceeded: it was not written in time.
        """
        path, end = Path(filename), time.monotonic() + timeout
        while True:
            found = cls._found(path)
            if not wait_for_file_creation:
                return _required(found, path)
            if found is not None and all(map(is_reachable, found.addresses[:1])):
                return found
            if time.monotonic() > end:
                raise _not_written(path, timeout, found)
            time.sleep(_POLL)

    @classmethod
    def _found(cls, path: Path) -> TfDataServiceConfig | None:
        """The content of a file; None if there is none."""
        try:
            found = cls.from_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise SetupError(
                f"{path} is not a file that `ktrainer data-service` wrote ({error}). Give the path "
                "that stands behind its --config"
            ) from error
        return replace(found, path=str(path))


def _required(found: TfDataServiceConfig | None, path: Path) -> TfDataServiceConfig:
    if found is None:
        raise SetupError(
            f"there is no file {path} of a tf.data service. Start one with `ktrainer data-service "
            f"-n 1 --config {path}`, on a path that both jobs can read"
        )
    return found


def _not_written(path: Path, timeout: float, stale: TfDataServiceConfig | None) -> DeadlineExceeded:
    why = (
        ""
        if stale is None
        else f": the one that is there is of a service that has ended, as nothing listens at "
        f"{stale.addresses[0]}"
    )
    text = (
        f"waited {timeout:g} s for the file {path} of a tf.data service{why}. Start `ktrainer "
        f"data-service -n 1 --config {path}` on a path that both jobs can read, or wait longer "
        "(data.service.deadline, or timeout=...)"
    )
    error = DeadlineExceeded(0, 0, "read the file of the tf.data service", timeout)
    error.args = (text,)
    return error


def is_reachable(address: str, seconds: float = 2.0) -> bool:
    """Return whether a dispatcher answers at `host:port`: the system accepts connections to one
    that hangs, too, so the greeting of its protocol is waited for.

    Args:
        seconds: to wait for the connection, and for the answer.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), seconds) as connection:
            connection.sendall(_GREETING)
            return connection.recv(1) != b""
    except OSError:
        return False


def write_json(path: Path, values: Any) -> None:
    """Replace a file at once."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(values, indent=2) + "\n")
    part.replace(path)


def dispatcher_file(path: str | os.PathLike[str], rank: int) -> Path:
    """The file in which training process `rank` gives the address of its dispatcher."""
    return Path(f"{os.fspath(path)}.dispatcher-{rank}")


def check_workers(workers: int, dispatchers: int) -> int:
    """The workers of each dispatcher.

    Raises:
        ConfigError: they cannot be shared out evenly.
    """
    if workers % dispatchers:
        low, high = workers - workers % dispatchers, workers - workers % dispatchers + dispatchers
        sizes = " or ".join(f"-n {n}" for n in (low, high) if n)
        raise ConfigError(
            f"{workers} workers cannot be shared by {dispatchers} dispatchers: {workers} / "
            f"{dispatchers} = {workers / dispatchers:.4g} workers each, which is no whole number. "
            f"Start {sizes}, or another number of --dispatchers"
        )
    return workers // dispatchers


def check_size(config: TfDataServiceConfig, size: int) -> None:
    """Refuse several dispatchers that are not one for each training process.

    Raises:
        ConfigError: as said.
    """
    if config.dispatchers not in (1, size):
        workers = config.dispatchers * config.workers_per_dispatcher
        raise ConfigError(
            f"{size} training processes and {config.dispatchers} dispatchers: several dispatchers "
            f"serve one training process each, so {size} are needed, or 1 for all. Restart the "
            f"service with --dispatchers {size} and -n a multiple of {size} (it has {workers} "
            f"workers), or with --dispatchers 1, or train with {config.dispatchers} processes"
        )
