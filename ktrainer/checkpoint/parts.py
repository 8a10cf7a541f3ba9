"""One checkpoint that several processes write: each stage of a pipeline its part.

    rank 0 (stage 0)                    stage 1, 2, ... of the same replica
    makes the temporary folder
    its name                     ──►
    arrays-p00-00001 ...                arrays-p01-00001 ...
    what is in which file        ◄──    or what went wrong
    state.json, manifest.json; renames

The stages meet in the world of their replica (`Placement.model`). Other replicas hold copies, and
write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.format import Described, flush_folder, unfit, write_arrays
from ktrainer.checkpoint.state import names_to_save
from ktrainer.errors import CheckpointError
from ktrainer.steps.placement import Placement, placement_of

_SHARED = "checkpoint.dir must be on a file system that all ranks share"


Write = Callable[[Path, Mapping[str, np.ndarray]], Described]


@contextmanager
def all_parts(model: Any, state: Mapping[str, Any]) -> Iterator[Write | None]:
    """Rank 0's side: what `write_checkpoint` calls to have every stage write its arrays. None if
    `model` is not cut into stages. On leaving, stages for which it never came to that are let go.

    Args:
        state: what `capture` gave on rank 0.
    """
    placement = placement_of(model)
    if placement is None:
        yield None
        return
    parts = _Parts(placement, model, state)
    try:
        yield parts.write
    finally:
        if not parts.told:
            parts.tell(None)


class _Parts:
    """Has all stages write, and puts together what they wrote."""

    def __init__(self, placement: Placement, model: Any, state: Mapping[str, Any]) -> None:
        self.placement, self.model, self.state = placement, model, state
        self.told = False

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> Described:
        """Have every stage write its arrays into `folder`; `arrays` are those of this one.

        Raises:
            CheckpointError: a stage could not; tells which, and why. All of them have ended.
        """
        names, folder = names_to_save(self.model, arrays, self.state), folder.resolve()
        self.tell(str(folder))
        part = _written(folder, arrays, self.placement)
        parts = self.placement.model.allgather(part, "parts of a checkpoint")
        problems = [part["error"] for part in parts if part["error"]]
        if problems:
            raise CheckpointError("; ".join(problems))
        return _put_together(folder, parts, names)

    def tell(self, folder: str | None) -> None:
        """Tell the other stages where to write."""
        self.told = True
        self.placement.model.broadcast(folder, 0, "folder of a checkpoint")


def write_part(arrays: Mapping[str, np.ndarray], placement: Placement) -> None:
    """The other stages' side: write `arrays` into the folder that rank 0 names. What goes wrong
    is rank 0's to tell."""
    folder = placement.model.broadcast(None, 0, "folder of a checkpoint")
    if folder is not None:
        part = _written(Path(folder), arrays, placement)
        placement.model.allgather(part, "parts of a checkpoint")


def _written(
    folder: Path, arrays: Mapping[str, np.ndarray], placement: Placement
) -> dict[str, Any]:
    number = placement.partition
    try:
        if not folder.is_dir():
            raise CheckpointError(f"it does not see {folder}, which rank 0 made: {_SHARED}")
        files, described = write_arrays(folder, arrays, f"p{number:02d}-")
        flush_folder(folder)
    except Exception as error:  # whatever it is, the other stages wait for an answer
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return {"error": f"stage {number} cannot write its part: {kind}{error}"}
    return {"error": None, "files": files, "arrays": described}


def _put_together(folder: Path, parts: Sequence[dict[str, Any]], names: list[str]) -> Described:
    files: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    problems = []
    for number, part in enumerate(parts):
        for name, facts in part["files"].items():
            problem = unfit(folder / name, facts["size"])
            if problem:
                problems.append(f"{name} of stage {number}, seen from rank 0: {problem}: {_SHARED}")
        problems += [f"two stages have {name}" for name in part["arrays"] if name in arrays]
        files.update(part["files"])
        arrays.update(part["arrays"])
    problems += [f"no stage has {name}" for name in names if name not in arrays]
    problems += [f"nobody expects {name}" for name in set(arrays).difference(names)]
    if problems:
        raise CheckpointError("; ".join(problems))
    return files, {name: arrays[name] for name in names}
