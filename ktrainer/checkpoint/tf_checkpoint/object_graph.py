"""The objects and variables in a file of `tf.train.Checkpoint`. Reading runs nothing from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ktrainer.errors import CheckpointError

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_COUNT = ("iter", "iterations")  # of optimizers before Keras 2.11, and since
# What Keras 2 keeps beside the weights: metrics and functions of a SavedModel, random generators.
NO_WEIGHTS = ("keras_api", "random_generator", "save_counter")


@dataclass(frozen=True)
class FileVariable:
    """A variable in the file.

    Attributes:
        node: its object in the graph.
        key: under which its value is stored.
        full_name: its name in TensorFlow, such as `dense/kernel`.
        shape: of its value.
        dtype: of its value, by name.
    """

    node: int
    key: str
    full_name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def path(self) -> str:
        """Its path by attributes, such as `model/layer_with_weights-0/kernel`."""
        return self.key.removesuffix(f"/.ATTRIBUTES/{_VALUE}")


class ObjectGraph:
    """The objects of a checkpoint, as numbers; 0 is the `tf.train.Checkpoint` itself.

    Args:
        prefix: the file's name without `.index`.

    Raises:
        CheckpointError: it is no checkpoint, or damaged.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        try:
            self._reader = tf.train.load_checkpoint(str(prefix))
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
            text = self._reader.get_tensor(_GRAPH) if _GRAPH in shapes else None
        except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
            raise self._unreadable(error) from error
        if text is None:
            raise CheckpointError(
                f"{prefix} holds variables by name only, as TensorFlow 1's Saver wrote them, and "
                "no objects. Load it in the script that wrote it, and save it there with "
                "tf.train.Checkpoint(model=model, optimizer=optimizer).save(...)."
            )
        graph = TrackableObjectGraph()
        try:
            graph.ParseFromString(text)
        except (DecodeError, TypeError) as error:
            raise self._unreadable(error) from error
        self._facts = {k: (tuple(shapes[k]), dtypes[k].name) for k in shapes}
        count = len(graph.nodes)
        self.children = [
            {c.local_name: c.node_id for c in node.children if 0 <= c.node_id < count}
            for node in graph.nodes
        ] or [{}]
        self.slots = [
            {(s.original_variable_node_id, s.slot_name): s.slot_variable_node_id
             for s in node.slot_variables if 0 <= s.slot_variable_node_id < count}
            for node in graph.nodes
        ] or [{}]  # fmt: skip
        self._variables = dict(self._found(graph.nodes))

    def _found(self, nodes: Iterable[Any]) -> Iterator[tuple[int, FileVariable]]:
        for number, node in enumerate(nodes):
            for each in node.attributes:
                if each.name == _VALUE and each.checkpoint_key in self._facts:
                    facts = self._facts[each.checkpoint_key]
                    yield number, FileVariable(number, each.checkpoint_key, each.full_name, *facts)

    def variable(self, node: int | None) -> FileVariable | None:
        """The variable that an object is; None if it is another kind of object."""
        return None if node is None else self._variables.get(node)

    def at(self, node: int | None, path: str) -> int | None:
        """The object at `path`, attributes and indices with slashes between, below `node`."""
        for word in path.split("/"):
            node = None if node is None else self.children[node].get(word)
        return node

    def positions(self) -> dict[int, int]:
        """Place of each object in a walk through all, depth first, in the order in which they
        were made attributes: that of a Keras 2 model's weights."""
        found: dict[int, int] = {}
        todo = [0]
        while todo:
            now = todo.pop()
            if now not in found:
                found[now] = len(found)
                todo += reversed(self.children[now].values())
        return found

    def tables(self) -> list[str]:
        """The paths of what is neither a variable nor a description: tables of lookup layers."""
        paths = (key.partition("/.ATTRIBUTES/") for key in self._facts)
        return sorted({path for path, _, what in paths if what.startswith("table")})

    def below(self, node: int, without: Iterable[int] = ()) -> list[FileVariable]:
        """The variables at and below an object that can be weights or slots, each once.

        Args:
            without: objects whose variables do not count.
        """
        seen, found, todo = set(without), [], [node]
        while todo:
            now = todo.pop(0)
            if now in seen:
                continue
            seen.add(now)
            variable = self.variable(now)
            found += [] if variable is None else [variable]
            todo += [
                c for name, c in self.children[now].items() if name.lstrip("_") not in NO_WEIGHTS
            ]
        return found

    def optimizers(self) -> list[int]:
        """The objects that are Keras optimizers."""
        return [
            node
            for node, children in enumerate(self.children)
            if self.slots[node]
            or any(name.lstrip("_") in _COUNT and self.variable(c) for name, c in children.items())
        ]

    def read(self, variable: FileVariable) -> np.ndarray:
        """The value of a variable.

        Raises:
            CheckpointError: its data is damaged or missing.
        """
        try:
            return np.asarray(self._reader.get_tensor(variable.key))
        except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.prefix} cannot be read: {str(error)[:300]}. It is damaged, cut off, or no "
            f"checkpoint: its two files are {self.prefix.name}.index and "
            f"{self.prefix.name}.data-00000-of-00001."
        )


def find_prefix(file: Path) -> Path:
    """The prefix of the checkpoint that `file` means.

    Args:
        file: a prefix, one of its files, or a folder, whose newest checkpoint it is.

    Raises:
        CheckpointError: there is none.
    """
    if file.name.endswith((".h5", ".keras", ".hdf5")):
        raise CheckpointError(
            f"{file} is a file of Keras, which Keras 3 loads itself: in a script, "
            "model.load_weights(FILE) before trainer.fit. This command reads files of "
            "tf.train.Checkpoint."
        )
    prefix = _newest(file) if file.is_dir() else file
    if prefix.name.endswith(".index") or ".data-" in prefix.name:
        prefix = prefix.with_name(prefix.name.removesuffix(".index").split(".data-")[0])
    if not prefix.with_name(prefix.name + ".index").is_file():
        raise CheckpointError(
            f"{file} is no checkpoint of tf.train.Checkpoint: there is no {prefix}.index. Give the "
            "name before .index, as in ckpts/ckpt-1, or the folder."
        )
    return prefix


def _newest(folder: Path) -> Path:
    try:
        state = tf.train.get_checkpoint_state(str(folder))
    except (tf.errors.OpError, ValueError) as error:
        raise CheckpointError(f"{folder / 'checkpoint'} cannot be read: {error}") from error
    if state is None or not state.model_checkpoint_path:
        raise CheckpointError(
            f"{folder} has no file named checkpoint, which would name the newest one. Give one by "
            "its prefix, as in ckpts/ckpt-1."
        )
    # By its name in this folder: the path is that of the machine that wrote it.
    return folder / Path(state.model_checkpoint_path).name
