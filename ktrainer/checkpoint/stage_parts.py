"""Write one checkpoint from several processes: each stage of a pipeline writes its part.

    rank 0 (stage 0)                    stage 1, 2, ... of the same replica
    makes the temporary folder
    its name                     ──►                             between two steps
    arrays-p00-00001 ...                arrays-p01-00001 ...     in the background
    table of files and arrays    ◄──    or the error             by non-blocking messages
    state.json, manifest.json; renames

Other replicas hold copies, and write nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.format.checkpoint_folder import (
    Described,
    flush_folder,
    invalid_file,
    write_arrays,
)
from ktrainer.errors import CheckpointError
from ktrainer.steps.variable_placement import Placement

_SHARED = "checkpoint.dir must be on a file system that all ranks share"
_LOOK_SECONDS = 0.01
_GRACE_SECONDS = 5.0  # for parts in progress when training has ended with an error


class StageParts:
    """Messages between the stages of one replica about the parts that they write.

    Made and closed by all stages together; everything else may be called from writer threads.

    Args:
        placement: of the model; of replica 0.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._mail: Any = None
        if placement.model.size > 1:
            from ktrainer.distributed.mpi_communicator import Mailbox

            self._mail = Mailbox(placement.model)  # type: ignore[arg-type]

    def send(
        self,
        number: int,
        folder: Path,
        arrays: Mapping[str, np.ndarray],
        ending: Callable[[], bool],
    ) -> None:
        """Write this stage's part of checkpoint `number`, and report it to the first stage.

        Args:
            ending: as in `collect`.

        Raises:
            CheckpointError: the first stage does not receive the message.
        """
        world = self.placement.model
        part = write_stage_part(folder, arrays, self.placement.partition)
        self._mail.send((number, part), 0)
        end = time.monotonic() + world.deadline
        while not self._mail.all_taken():
            end = _sooner(end, ending)
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank {world.ranks[world.rank]} waited {world.deadline:g} s at step "
                    f"{world.step} for rank {world.ranks[0]} to receive its part of a checkpoint"
                )
            time.sleep(_LOOK_SECONDS)

    def collect(
        self,
        number: int,
        folder: Path,
        arrays: Mapping[str, np.ndarray],
        names: Sequence[str],
        ending: Callable[[], bool],
    ) -> Described:
        """On the first stage: write its part, and wait for those of the others.

        Args:
            number: number of the checkpoint in this run.
            names: names of all arrays, in the order of the manifest.
            ending: whether training has ended with an error, so that others may have exited.

        Raises:
            CheckpointError: a stage could not write its part, or does not answer.
        """
        parts = {0: write_stage_part(folder, arrays, self.placement.partition)}
        world = self.placement.model
        end = time.monotonic() + world.deadline
        while len(parts) < world.size:
            for rank, (their_number, part) in self._mail.take():
                if their_number == number:  # else of an abandoned checkpoint
                    parts[rank] = part
            end = _sooner(end, ending)
            if len(parts) < world.size and time.monotonic() > end:
                raise CheckpointError(self._missing(parts))
            if len(parts) < world.size:
                time.sleep(_LOOK_SECONDS)
        ordered = [parts[rank] for rank in range(world.size)]
        problems = [part["error"] for part in ordered if part["error"]]
        if problems:
            raise CheckpointError("; ".join(problems))
        return merge_stage_parts(folder, ordered, names)

    def _missing(self, parts: Mapping[int, Any]) -> str:
        world = self.placement.model
        missing = [rank for rank in range(world.size) if rank not in parts]
        who = ", ".join(f"stage {rank} (rank {world.ranks[rank]})" for rank in missing)
        return (
            f"rank {world.ranks[0]} waited at step {world.step} for parts of a checkpoint, at most "
            f"{world.deadline:g} s, and received none from {who}. If writing takes that long, "
            "raise world.deadline."
        )

    def close(self) -> None:
        """Close the mailbox; all stages call it together."""
        if self._mail is not None:
            self._mail.close()


def _sooner(end: float, ending: Callable[[], bool]) -> float:
    return min(end, time.monotonic() + _GRACE_SECONDS) if ending() else end


def write_stage_part(folder: Path, arrays: Mapping[str, np.ndarray], number: int) -> dict[str, Any]:
    """Write a stage's part; return its tables of files and arrays, or the error."""
    try:
        if not folder.is_dir():
            raise CheckpointError(f"it cannot see {folder}, which rank 0 made: {_SHARED}")
        files, described = write_arrays(folder, arrays, f"p{number:02d}-")
        flush_folder(folder)
    except Exception as error:  # of any type: the first stage waits for an answer
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return {"error": f"stage {number} cannot write its part: {kind}{error}"}
    return {"error": None, "files": files, "arrays": described}


def merge_stage_parts(
    folder: Path, parts: Sequence[dict[str, Any]], names: Sequence[str]
) -> Described:
    """The tables of files and arrays of all parts.

    Raises:
        CheckpointError: the checkpoint is incomplete, or rank 0 cannot see its files.
    """
    files: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    problems = []
    for number, part in enumerate(parts):
        for name, facts in part["files"].items():
            problem = invalid_file(folder / name, facts["size"])
            if problem:
                problems.append(f"{name} of stage {number}, seen from rank 0: {problem}: {_SHARED}")
        problems += [f"two stages have {name}" for name in part["arrays"] if name in arrays]
        files.update(part["files"])
        arrays.update(part["arrays"])
    problems += [f"no stage has {name}" for name in names if name not in arrays]
    problems += [f"{name} is unexpected" for name in set(arrays).difference(names)]
    if problems:
        raise CheckpointError("; ".join(problems))
    return files, {name: arrays[name] for name in names}
