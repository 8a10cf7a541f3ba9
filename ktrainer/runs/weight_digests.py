"""Digests of the weights in checkpoints, by which the weights of several runs are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktrainer.errors import CheckpointError
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import place

MOST_BYTES = 2 * 2**30  # of a checkpoint's weights, which are read: about a second
_WEIGHTS = "model/"

Saved = tuple[int, int]  # the call of `fit`, and updates done in it


@dataclass(frozen=True)
class WeightDigests:
    """The weights of several runs after the same step of the same call of `fit`.

    Attributes:
        saved: the newest of which more than one run has a checkpoint; None: there is none.
        digests: by run, those of its arrays by name; None: it has no such checkpoint.
        problem: why there are none.
    """

    saved: Saved | None
    digests: Sequence[dict[str, str] | None] = ()
    problem: str = ""

    @property
    def when(self) -> str:
        """`step 20`, or `step 20 of fit 2`."""
        assert self.saved is not None
        fit, step = self.saved
        return f"step {step} of fit {fit}" if fit > 1 else f"step {step}"

    @property
    def differing(self) -> list[str]:
        """The arrays that are not the same in all checkpoints."""
        known = [each for each in self.digests if each is not None]
        names = dict.fromkeys(name for each in known for name in each)
        return [name for name in names if len({each.get(name) for each in known}) > 1]


def weight_digests(records: Sequence[RunRecord]) -> WeightDigests:
    """Compare the weights of runs after the newest step of which several have a checkpoint."""
    saved = [_checkpoints(record) for record in records]
    every = Counter(each for run in saved for each in run)
    common = [each for each, count in every.items() if count > 1]
    if not common:
        return WeightDigests(None, problem="the runs have no checkpoint of the same step")
    newest = max(common)
    try:
        digests = [_digests(run[newest]) if newest in run else None for run in saved]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
        problem = f"a checkpoint of step {newest[1]} cannot be read: {error}"
        return WeightDigests(newest, problem=problem)
    return WeightDigests(newest, digests)


def _checkpoints(record: RunRecord) -> dict[Saved, Path]:
    """The complete checkpoints of a run."""
    found = {}
    folders = {(place(start), str(start.get("checkpoints"))): start for start in record.starts}
    for start in folders.values():
        for checkpoint in record.checkpoints_of(start):
            number = checkpoint.name.removeprefix("step-")
            if number.isdecimal():
                found[place(start)[0], int(number)] = checkpoint
    return found


def _digests(checkpoint: Path) -> dict[str, str]:
    """Digests of the weights in a checkpoint, by name.

    Raises:
        CheckpointError: it is damaged.
        ValueError: its arrays are damaged, or too large to be read for this.
    """
    # NumPy takes longer to import than a report of one run takes.
    from blake3 import blake3

    from ktrainer.checkpoint.format.checkpoint_reader import read_manifest
    from ktrainer.checkpoint.format.safetensors_file import open_shard

    arrays = read_manifest(checkpoint)["arrays"]
    names = [name for name in arrays if name.startswith(_WEIGHTS)]
    files = {arrays[name]["file"] for name in names}
    size = sum((checkpoint / Path(file).name).stat().st_size for file in files)
    if size > MOST_BYTES:
        raise ValueError(f"{size / 1e9:.1f} GB of weights take too long; use `cmp` on its files")
    opened = {file: open_shard(checkpoint / Path(file).name) for file in files}
    found = {}
    for name in names:
        value = opened[arrays[name]["file"]][name]
        shape = f"{value.dtype}{list(value.shape)}".encode()
        digest = blake3(shape)
        digest.update(value.reshape(-1).view("uint8").data)
        found[name.removeprefix(_WEIGHTS)] = digest.hexdigest()[:12]
    return found
