"""Digests of the weights in checkpoints, by which the weights of several runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktrainer.errors import CheckpointError
from ktrainer.runs.run_record import RunRecord

MOST_BYTES = 2 * 2**30  # of a checkpoint's weights, which are read: about a second
_WEIGHTS = "model/"


@dataclass(frozen=True)
class WeightDigests:
    """The weights of several runs after the same step.

    Attributes:
        step: the newest of which more than one run has a checkpoint; None: there is none.
        digests: by run, those of its arrays by name; None: it has no such checkpoint.
        problem: why there are none.
    """

    step: int | None
    digests: Sequence[dict[str, str] | None] = ()
    problem: str = ""

    @property
    def differing(self) -> list[str]:
        """The arrays that are not the same in all checkpoints."""
        known = [each for each in self.digests if each is not None]
        names = dict.fromkeys(name for each in known for name in each)
        return [name for name in names if len({each.get(name) for each in known}) > 1]


def weight_digests(records: Sequence[RunRecord]) -> WeightDigests:
    """Compare the weights of runs after the newest step of which several have a checkpoint."""
    saved = [_checkpoints(record) for record in records]
    steps = [step for each in saved for step in each]
    common = {step for step in steps if steps.count(step) > 1}
    if not common:
        return WeightDigests(None, problem="the runs have no checkpoint of the same step")
    step = max(common)
    try:
        digests = [_digests(each[step]) if step in each else None for each in saved]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
        return WeightDigests(step, problem=f"a checkpoint of step {step} cannot be read: {error}")
    return WeightDigests(step, digests)


def _checkpoints(record: RunRecord) -> dict[int, Path]:
    """The complete checkpoints of a run, by step."""
    if record.checkpoint is None:
        return {}
    found = {}
    for manifest in record.checkpoint.parent.glob("step-*/manifest.json"):
        number = manifest.parent.name.removeprefix("step-")
        if number.isdecimal():
            found[int(number)] = manifest.parent
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
