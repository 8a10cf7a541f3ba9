"""A run in Weights & Biases, online or offline.

`wandb` writes in the background, in a process of its own, and drops a step that is not greater than
the last. Its step is ours, so after a restart it, or offline its files, tell what has arrived.
Offline each start has files of its own, with one run id.
"""

from __future__ import annotations

import inspect
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktrainer.callbacks.trackers.tracker_run import Point, RunFacts, TrackerRun
from ktrainer.errors import ConfigError

_FINISH_SECONDS = 25.0  # less than the wait for a tracker at the end of a run

# Its offline file: a log as LevelDB has it, after a header of 7 bytes: blocks of 32 KiB with
# records of (checksum, length, kind), each a whole message of `wandb.proto`, or a part of one.
_BLOCK, _MAGIC = 32768, b":W&B\xe1\xbe\x00"
_HEAD = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4  # 3: a part between the first and the last


class WandbRun(TrackerRun):
    """Rows as the history of a run, settings and facts as its config, the diff as a file."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        import wandb

        # It reads the output of the process otherwise, and prints to it.
        # Without an end to its wait, it keeps the process when its server is away.
        settings = {"silent": True, "console": "off", "finish_timeout": _FINISH_SECONDS}
        settings |= {"finish_timeout_raises": True, **arguments.get("settings", {})}
        if facts.secret_words:
            settings["x_disable_meta"] = True  # it keeps the command line, among others
        given = {"name": facts.name, "dir": str(facts.folder), **arguments}
        given["settings"] = wandb.Settings(**settings)
        self._id, self._sent = facts.token, facts.sent
        self._run = wandb.init(
            id=facts.token,
            resume="allow",
            reinit="create_new",
            config={"settings": facts.settings, **facts.more},
            allow_val_change=True,
            **given,
        )
        if facts.diff:
            diff = Path(self._run.dir) / "code.diff"
            diff.write_text(facts.diff, encoding="utf-8")
            self._run.save(str(diff), base_path=self._run.dir, policy="now")

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        import wandb

        refuse_unknown(arguments, wandb.init, "wandb")

    def held(self) -> int:
        if not self._run.offline:
            return int(self._run.starting_step) - 1
        folder = Path(self._run.settings.wandb_dir)
        starts = set(folder.glob(f"*run-*-{self._id}"))
        starts.discard(Path(self._run.settings.sync_dir))  # this one
        if not starts:  # it is the first, or the others were uploaded, and removed
            return self._sent
        files = [file for start in starts for file in start.glob(f"run-{self._id}.wandb")]
        return max((step for file in files for step, _ in rows_in(file)), default=-1)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step, commit=True)

    def close(self, reason: str | None) -> None:
        self._run.finish(exit_code=0 if reason in ("finished", None) else 1)


def refuse_unknown(arguments: Mapping[str, Any], init: Any, tracker: str) -> None:
    """Refuse arguments that the `init` of a library does not have.

    Raises:
        ConfigError: for the first one found.
    """
    known = list(inspect.signature(init).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"{tracker}.init of the installed version has no such argument.",
                path=f"logging.{tracker}.{name}",
                value=name,
                known=known,
            )


def rows_in(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of each row in the file of an offline run, which wandb itself cannot read
    back; up to where a killed process has left it."""
    from wandb.proto.wandb_internal_pb2 import Record

    for message in _messages(file.read_bytes()):
        record = Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            items = record.history.item
            named = {item.key or ".".join(item.nested_key): item.value_json for item in items}
            yield record.history.step.num, {key: json.loads(text) for key, text in named.items()}


def _messages(data: bytes) -> Iterator[bytes]:
    """The complete messages; nothing after the first record that is damaged or cut off."""
    if not data.startswith(_MAGIC):
        return
    at, message = len(_MAGIC), b""
    while True:
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left  # padding
        head = data[at : at + _HEAD.size]
        if len(head) < _HEAD.size:
            return
        checksum, length, kind = _HEAD.unpack(head)
        at += _HEAD.size
        part = data[at : at + length]
        at += length
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        message = part if kind in (_WHOLE, _FIRST) else message + part
        if kind in (_WHOLE, _LAST):
            yield message
