"""Report what a host has, and which other hosts it reaches.

`host_check` sends the text of this file to every host, where the same Python runs it: ktrainer may
be missing there, so it imports the standard library alone. Questions come as lines of JSON on
standard input, answers go out as lines that begin with `PREFIX`:

| question | answer |
|---|---|
| `files`, `folders`, `package`, `distributions`, `mpirun` | what `report` returns |
| `listen`: an address | `port`, on which this process now listens there |
| `peers`: name -> (address, port) | `unreachable`: name -> the error |
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

PREFIX = "ktrainer host: "
CONNECT_SECONDS = 3.0
_MPIRUN_SECONDS = 4.0
_ADDRESS, _NETMASK = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK


def report(question: dict[str, Any]) -> dict[str, Any]:
    """Facts about this host, as `host_check` compares them."""
    return {
        "python": platform.python_version(),
        "distributions": {name: _version(name) for name in question["distributions"]},
        "package": _digest_of_package(question["package"]),
        "files": {path: _digest(path) for path in question["files"]},
        "cwd": os.path.isdir(question["cwd"]),
        "folders": {
            key: {**_write(folder), "shared": os.path.exists(marker)}
            for key, (folder, marker) in question["folders"].items()
        },
        "temporary": _write(tempfile.gettempdir()),
        "mpi": _mpi(question["mpirun"]),
        "interfaces": _interfaces(),
        "time": time.time(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def _digest_of_package(folder: str) -> str | None:
    digest, count = hashlib.sha256(), 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                digest.update(f"{os.path.relpath(path, folder)} {_digest(path)}\n".encode())
                count += 1
    return digest.hexdigest() if count else None


def _write(folder: str) -> dict[str, Any]:
    """Free bytes of a folder, and the error of writing a file there."""
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as error:
        return {"free": None, "path": folder, "error": error.strerror or str(error)}
    return {"free": free, "path": folder, "error": None}


def _mpi(mpirun: str) -> str | None:
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=_MPIRUN_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        return f"silent for {_MPIRUN_SECONDS:g} s after `mpirun --version`"
    return next(iter(done.stdout.splitlines()), None)


def _interfaces() -> list[tuple[str, str, str]]:
    """Name, IPv4 address and netmask of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            packed = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                pair = [fcntl.ioctl(asked, code, packed)[20:24] for code in (_ADDRESS, _NETMASK)]
                found.append((name, socket.inet_ntoa(pair[0]), socket.inet_ntoa(pair[1])))
    return found


def _unreachable(peers: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to all peers at once; return the errors."""
    errors: dict[str, str] = {}

    def connect(name: str, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            errors[name] = error.strerror or str(error)

    threads = [threading.Thread(target=connect, args=(name, *peer)) for name, peer in peers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def main() -> None:
    """Answer questions until standard input ends."""
    with contextlib.ExitStack() as stack:
        while line := sys.stdin.readline():
            question = json.loads(line)
            if "listen" in question:
                server = stack.enter_context(socket.create_server((question["listen"], 0)))
                answer: dict[str, Any] = {"port": server.getsockname()[1]}
            elif "peers" in question:
                answer = {"unreachable": _unreachable(question["peers"])}
            else:
                answer = report(question)
            print(PREFIX + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
