"""All groups of a test session, each started at its first use."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.dist.harness.group import Ranks
from tests.dist.harness.warm import WarmProcesses

AWAKE = "cluster"  # TensorFlow takes the silence of a stopped process for its death
DEVICES = ("cluster", "strategies")  # of several devices each, made before TensorFlow is used

_LEAST = 2  # a test may use two at once
_ROOM_BYTES = 8 * 2**30  # for a group of four, and what other tests start meanwhile

_Key = tuple[int, str, tuple[tuple[str, str], ...], tuple[str, ...]]


class Pool:
    """Groups of ranks by size and mode, all forks of processes that have imported TensorFlow."""

    def __init__(self) -> None:
        self._groups: dict[_Key, Ranks] = {}
        self._ended: list[Ranks] = []
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._warm = WarmProcesses(Path(self._folder.name))

    def ranks(
        self,
        size: int,
        mode: str = "",
        *,
        env: Mapping[str, str] | None = None,
        mpirun: Sequence[str] = (),
    ) -> Ranks:
        """The group of `size` ranks; a broken one is replaced.

        Args:
            mode: any name: groups with different modes are different processes. Tests that
                start Horovod use "horovod", because its background thread stays for good;
                those of strategies "strategies", or "cluster" and more: these have four devices.
            env, mpirun: as for `Ranks`; another group for each combination.
        """
        key = (size, mode, tuple(sorted((env or {}).items())), tuple(mpirun))
        group = self._groups.pop(key, None)
        spoilt = mode.startswith(AWAKE) and group is not None and group.failed
        if group is None or not group.alive or spoilt:  # TensorFlow's connection fails for good
            if group is not None:
                self._end(group)
            self._make_room()
            group = Ranks(size, env=env, mpirun=mpirun, warm=self._warm)
            if mode.startswith(DEVICES):
                from tests.tf_distribute.running import make_devices

                group.run(make_devices)
        self._groups[key] = group  # last, as the one used most recently
        return group

    def _make_room(self) -> None:
        """End groups that were not used for longest, where memory is short."""
        while len(self._groups) > _LEAST and psutil.virtual_memory().available < _ROOM_BYTES:
            self._end(self._groups.pop(next(iter(self._groups))))

    def _end(self, group: Ranks) -> None:
        group.close()
        self._ended.append(group)

    def end_clusters(self) -> None:
        """End the groups that are never stopped: the longer they idle, the likelier is a pause of
        the machine that is longer than TensorFlow's heartbeats may take."""
        for key in [key for key in self._groups if key[1].startswith(AWAKE)]:
            self._end(self._groups.pop(key))

    def pause(self) -> None:
        """Stop all ranks until their next tasks, but for those that listen for one another."""
        for (_, mode, *_), group in self._groups.items():
            if not mode.startswith(AWAKE):
                group.pause()

    def close(self) -> list[int]:
        """End all groups. Returns the process ids of ranks that did not end, which is a bug."""
        groups = [*self._groups.values(), *self._ended]
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._warm.close()
        self._folder.cleanup()
        return [pid for group in groups for pid in group.survivors()]
