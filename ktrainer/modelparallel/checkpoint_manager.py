"""`CheckpointManager`: checkpoints of a custom loop, over a model that is cut into stages.

Each stage of the first replica writes the variables that it has into one folder, which appears
under its name when it is complete, and which any number of partitions reads.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.checkpoint import read_checkpoint
from ktrainer.checkpoint.format.checkpoint_folder import (
    finish_checkpoint,
    make_temporary,
    temporary_checkpoint,
)
from ktrainer.checkpoint.format.checkpoint_reader import read_state
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.checkpoint.stage_parts import merge_stage_parts, write_stage_part
from ktrainer.errors import CheckpointError, ConfigError
from ktrainer.modelparallel.distributed_model import DistributedModel, register_post_partition_hook
from ktrainer.modelparallel.state import current
from ktrainer.steps.named_variables import unique_names
from ktrainer.steps.optimizers import aligned_slots
from ktrainer.steps.variable_placement import placement_of

_Arrays = Mapping[str, np.ndarray]


class CheckpointManager:
    """Saves and restores the objects of a `tf.train.Checkpoint`, keeping the newest files.

    All ranks make it, and call `save` and `restore`, together; `directory` is one that all see.

    Args:
        checkpoint: `tf.train.Checkpoint(model=model, optimizer=optimizer, step=variable)`: a Keras
            model, optimizers and variables, by names of one's own.
        directory: where checkpoints are written.
        max_to_keep: how many are kept, the newest ones; None: all.
        checkpoint_name: what their names begin with.

    Raises:
        ConfigError: `max_to_keep` is less than 1, or the checkpoint has other objects.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        whole = isinstance(max_to_keep, int) and not isinstance(max_to_keep, bool)
        if max_to_keep is not None and (not whole or max_to_keep < 1):
            raise ConfigError(
                f"max_to_keep={max_to_keep!r}: keep an integer of 1 or more, or None for all"
            )
        self._checkpoint, self._keep = checkpoint, max_to_keep
        self._directory, self._prefix = Path(directory), checkpoint_name
        self._pending: _Arrays | None = None
        self._restored: list[Any] = []  # variables that have their values already
        self._hooked_for: Any = None  # whose hooks end with it
        self._objects()
        self._store, self._saves = Store(directory), False
        # One that a save was replacing when it was killed: the newest one, maybe the only one.
        self._store.sweep(self._pattern, alone=False)

    @property
    def checkpoint(self) -> Any:
        """The saved objects."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return str(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the complete checkpoints, in the order in which they were saved."""
        times = self._times()
        # One that cannot be read may be the newest: to restore it says why it cannot.
        order = sorted(self._numbers(), key=lambda number: times.get(number, math.inf))
        return [str(self._path(number)) for number in order]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest one; None if there is none."""
        return next(reversed(self.checkpoints), None)

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None
    ) -> str:
        """Write a checkpoint; return its path when it is complete.

        Args:
            checkpoint_number: an integer or a variable; None: one more than the highest.
            check_interval, options: are not used: every call saves.

        Raises:
            CheckpointError: on every rank, when a rank cannot write.
        """
        state = current()
        arrays = {name: _value(variable) for name, variable in self._variables().items()}
        if checkpoint_number is None:
            is_first = state.world.rank == 0
            checkpoint_number = max(self._numbers(), default=0) + 1 if is_first else 0
        path = self._path(int(state.world.broadcast(int(checkpoint_number), 0, "smp: save")))
        error = self._write(path, arrays) if state.dp.rank == 0 else None
        error = state.world.broadcast(error, 0, f"smp: save {path.name}")
        if error is not None:
            raise CheckpointError(error)
        return str(path)

    def restore(self, save_path: str | os.PathLike[str] | None = None) -> str | None:
        """Read a checkpoint; return its path, None if there is none yet.

        Before the first step, the variables of a model that is not cut yet get their values when
        it is, and so do an optimizer's slots. What exists already gets its value at once, such as
        the learning rate, and may be changed afterwards.

        Args:
            save_path: one of `checkpoints`; None: the newest one.

        Raises:
            CheckpointError: on every rank, when the files are damaged, or do not fit the variables.
        """
        world = current().world
        path = None if save_path is None else os.fspath(save_path)
        if path is None and world.rank == 0:
            path = self.latest_checkpoint
        path = world.broadcast(path, 0, "smp: which checkpoint to restore")
        if path is None:
            return None
        arrays: _Arrays = {}
        error = None
        try:
            arrays, _ = read_checkpoint(path)
        except CheckpointError as raised:
            error = f"rank {world.rank}: {raised}"
        _raise_all(world.allgather(error, "smp: restore"))
        if not self._uncut():
            _raise_all(world.allgather(self._assign(arrays), "smp: restore"))
            return path
        models = [x for x in self._objects().values() if isinstance(x, DistributedModel)]
        if len(models) > 1:
            raise CheckpointError(
                f"models {', '.join(repr(model.name) for model in models)} are cut into stages by "
                "their first steps: a checkpoint of several is restored once all of them are. Make "
                "a CheckpointManager for each model to restore before the first step."
            )
        self._pending, self._restored = arrays, self._assign_existing(arrays)
        if self._hooked_for is not current():
            self._hooked_for = current()
            register_post_partition_hook(self._assign_pending)
        return path

    def restore_or_initialize(self) -> str | None:
        """The same as `restore()`."""
        return self.restore()

    def _assign_pending(self) -> None:
        if self._pending is None or self._uncut():
            return
        arrays, self._pending = self._pending, None
        error = self._assign(arrays, self._restored)
        self._restored = []
        _raise_all(current().mp.allgather(error, "smp: restore"))

    def _assign_existing(self, arrays: _Arrays) -> list[Any]:
        """Give the variables that there are before the model is cut their values; return them."""
        found: dict[str, Any] = {}
        for name, each in self._objects().items():
            if isinstance(each, (tf.Variable, keras.Variable)):
                found[name] = each
            elif isinstance(each, keras.optimizers.Optimizer) and not each.built:
                found.update(_of_optimizer(name, each, {}))
        # What does not fit is an error once all variables are known.
        fits = {n: v for n, v in found.items() if n in arrays and not _differs(v, arrays[n])}
        for name, variable in fits.items():
            variable.assign(arrays[name])
        return list(fits.values())

    def _assign(self, arrays: _Arrays, restored: Sequence[Any] = ()) -> str | None:
        """Give variables the values of a checkpoint, but for those `restored` before; return why
        that cannot be, on all stages, and then none has changed."""
        models = [x for x in self._objects().values() if isinstance(x, keras.Model)]
        for key, each in self._objects().items():
            has_slots = any(name.startswith(f"{key}/slots/") for name in arrays)
            if isinstance(each, keras.optimizers.Optimizer) and not each.built and has_slots:
                if len(models) != 1:
                    return f"optimizer {key!r} is restored with one model, or once it is built"
                each.build(models[0].trainable_variables)
        variables = self._variables()
        every = set().union(*current().mp.allgather(set(variables), "smp: restore"))
        missing = sorted(every - set(arrays))
        extra = sorted(set(arrays) - every)
        wrong = [
            f"{name} {differs}"
            for name, variable in variables.items()
            if name in arrays and (differs := _differs(variable, arrays[name]))
        ]
        parts = current().mp.allgather(wrong, "smp: restore")
        wrong = list(dict.fromkeys(text for part in parts for text in part))
        if missing or extra or wrong:
            texts = [f"it has no {', '.join(missing)}"] if missing else []
            texts += [f"it has {', '.join(extra)}, which are not here"] if extra else []
            texts += [f"it has {', '.join(wrong)}"] if wrong else []
            return f"the checkpoint does not fit the objects: {'; '.join(texts)}"
        known = set(map(id, restored))
        for name, variable in variables.items():
            if id(variable) not in known:
                variable.assign(arrays[name])
        return None

    def _write(self, path: Path, arrays: _Arrays) -> str | None:
        """Write this stage's part; on the first stage complete the checkpoint. Return an error."""
        stages, made, error = current().mp, "", None
        if stages.rank == 0:
            try:
                if not self._saves:
                    self._store.sweep(self._pattern)
                self._saves = True
                made = str(make_temporary(path))
            except (CheckpointError, OSError) as raised:
                error = str(raised)
        made, error = stages.broadcast((made, error), 0, "smp: a folder for a checkpoint")
        if error is not None:
            return error
        names = stages.allgather(list(arrays), "smp: variables of each stage")
        earlier = {name for theirs in names[: stages.rank] for name in theirs}
        mine = {name: value for name, value in arrays.items() if name not in earlier}
        part = write_stage_part(Path(made), mine, stages.rank)
        parts = stages.allgather(part, f"smp: parts of {path.name}")
        return self._finish(path, Path(made), parts, names) if stages.rank == 0 else None

    def _finish(
        self, path: Path, made: Path, parts: list[dict[str, Any]], names: list[list[str]]
    ) -> str | None:
        every = list(dict.fromkeys(name for theirs in names for name in theirs))
        problems = [part["error"] for part in parts if part["error"]]
        try:
            with temporary_checkpoint(path, made):
                if problems:
                    raise CheckpointError("; ".join(problems))
                described = merge_stage_parts(made, parts, every)
                # Hosts' clocks differ, and this one is the newest.
                saved = max([time.time(), *(earlier + 1e-3 for earlier in self._times().values())])
                finish_checkpoint(made, path, described, {"partitions": len(parts), "saved": saved})
            times = self._times()
            for number in sorted(times, key=times.__getitem__)[: -self._keep] if self._keep else ():
                self._store.remove(self._path(number))
        except (CheckpointError, OSError) as raised:
            return str(raised)
        return None

    def _variables(self) -> dict[str, Any]:
        """The variables that this process has, by names that are the same in all.

        Raises:
            CheckpointError: a model is not cut yet.
        """
        if waiting := self._uncut():
            raise CheckpointError(
                f"model {waiting[0]!r} has no variables yet: it is cut into stages by its first "
                "step. Save after that."
            )
        objects, found = self._objects(), {}
        names: dict[int, str] = {}
        for key, each in objects.items():
            if isinstance(each, keras.Model):
                placement = placement_of(each)
                own = unique_names([f"{key}/{v.path}" for v in each.variables])
                for name, variable in zip(own, each.variables, strict=True):
                    names[id(variable)] = name.removeprefix(f"{key}/")
                    if placement is None or placement.holds(variable):
                        found[name] = variable
        for key, each in objects.items():
            if isinstance(each, keras.optimizers.Optimizer):
                found.update(_of_optimizer(key, each, names))
            elif not isinstance(each, keras.Model):
                found[key] = each
        return found

    def _uncut(self) -> list[str]:
        models = [x for x in self._objects().values() if isinstance(x, DistributedModel)]
        return [model.name for model in models if placement_of(model) is None]

    def _objects(self) -> dict[str, Any]:
        found = {k: v for k, v in vars(self._checkpoint).items() if not k.startswith("_")}
        kinds = (keras.Model, keras.optimizers.Optimizer, keras.Variable, tf.Variable)
        for name, each in found.items():
            if not isinstance(each, kinds):
                raise ConfigError(
                    f"{name!r} of the checkpoint, {type(each).__name__}, cannot be saved: it takes "
                    "Keras models, Keras optimizers and variables"
                )
        return found

    def _numbers(self) -> list[int]:
        """The numbers of the checkpoints, in order: another run may have left higher ones."""
        names = os.listdir(self._directory) if self._directory.is_dir() else []
        found = [name for name in names if re.fullmatch(self._pattern, name)]
        return sorted(int(name.rpartition("-")[2]) for name in found)

    @property
    def _pattern(self) -> str:
        """A pattern of the names of checkpoints."""
        return rf"{re.escape(self._prefix)}-\d+"

    def _times(self) -> dict[int, float]:
        """When checkpoints were saved, by number, but for those that cannot be read now."""
        found = {}
        for number in self._numbers():
            with suppress(OSError, ValueError):
                found[number] = _saved(self._path(number))
        return found

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._prefix}-{number}"


def _saved(path: Path) -> float:
    """The time at which a checkpoint was saved; 0 if it does not say."""
    state = read_state(path)
    return float(state.get("saved", 0.0)) if isinstance(state, dict) else 0.0


def _of_optimizer(key: str, optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The variables of an optimizer; slots are named by their weights."""
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    slots = aligned_slots(plain) if optimizer.built else {}
    every = []
    for variable in optimizer.variables:
        weight = slots.get(id(variable))
        kind = "counters" if weight is None else "slots"
        where = "" if weight is None else f"{names.get(id(weight), weight.path)}/"
        every.append(f"{key}/{kind}/{where}{variable.name}")
    # Some optimizers call several slots of a weight alike; in each process in the same order.
    return dict(zip(unique_names(every), optimizer.variables, strict=True))


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def _differs(variable: Any, array: np.ndarray) -> str:
    """How the shape, or else the dtype, of `array` differs from that of `variable`; or empty."""
    shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype).name
    if shape != array.shape:
        return f"{list(array.shape)} instead of {list(shape)}"
    return "" if dtype == array.dtype.name else f"of {array.dtype.name} instead of {dtype}"


def _raise_all(errors: list[str | None]) -> None:
    if said := [error for error in errors if error]:
        raise CheckpointError("; ".join(dict.fromkeys(said)))
