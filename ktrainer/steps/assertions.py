"""Run-time assertions inside compiled steps, and their errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ktrainer.errors import DataError, ModelError

if TYPE_CHECKING:
    from ktrainer.steps.program_interface import LocalBatchLike

_CHECK = "ktrainer: "  # marks our own checks among TensorFlow's


def assert_in_graph(condition: tf.Tensor, message: str, *numbers: Any) -> list[Any]:
    """Have a step fail unless `condition` is true, which is known only when it runs.

    Args:
        message: without brackets and quotation marks.
        numbers: tensors to be printed after it.

    Returns:
        The operations that others must wait for.
    """
    check = tf.debugging.Assert(condition, [_CHECK + message, *numbers], summarize=-1)
    return [] if check is None else [check]


def assert_some_rows(count: tf.Tensor) -> list[Any]:
    """Have a step of the user's own fail whose arguments have no rows on any rank.

    Args:
        count: greater than 0 where a rank has some.

    Returns:
        The operations that others must wait for.
    """
    return assert_in_graph(
        count > 0,
        "no rank has any rows of what trainer.run was given, so the step would train on nothing. "
        "All tensors that it is given are rows of one batch: give a step its constants otherwise, "
        "as variables, or let it use them from outside. Rows:",
        tf.cast(count, tf.int64),
    )


@contextmanager
def explain_assertions() -> Iterator[None]:
    """Turn failures of `assert_in_graph` into errors of this package; steps run inside.

    Raises:
        ModelError: one has failed.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(_CHECK + r"([^]\']*)[]\']?(.*)", str(error.message))
        if found is None:
            raise
        numbers = re.sub(r"[^-0-9 ]", " ", found[2])
        raise ModelError(" ".join(f"{found[1]} {numbers}".split())) from error


def error_of_split(
    error: tf.errors.OpError, local_batches: Sequence[LocalBatchLike], replicas: int, advice: str
) -> DataError | None:
    """Explain an error of a step that had only a part of a batch; None if it had all of it. The
    model may need all of it, as where the first axis is not examples.

    Args:
        error: of TensorFlow.
        local_batches: those of the step.
        replicas: how many parts of a local batch are stepped on in this process.
        advice: what to do, as the end of a sentence.
    """
    split = [each for each in local_batches if each.examples < each.global_examples or replicas > 1]
    if not split or not isinstance(error, tf.errors.InvalidArgumentError):
        return None
    rows = -(-split[0].examples // replicas)
    return DataError(
        f"a step failed on a part of a batch, {rows} of its {split[0].global_examples} rows: "
        f"{_reason(str(error.message))} If the first axis of these batches is not examples, they "
        f"cannot be cut by it: {advice}. If the step has the rows of a batch as a constant, let it "
        "take `tf.shape(x)[0]`."
    )


def _reason(message: str) -> str:
    """TensorFlow's reason, without the frames before it and the nodes after it."""
    lines = [line.split(" [[")[0].split(" [Op:")[0].strip() for line in message.splitlines()]
    lines = [re.sub(r"^\(0\) [A-Z_]+:\s*|^\{\{.*?\}\}\s*", "", line) for line in lines]
    frames = ("File ", "Graph execution", "Detected", "[[")
    said = [line for line in lines if " " in line and not line.startswith(frames)]
    said = [line for line in said if "root error(s) found" not in line]
    return (said[0] if said else "").rstrip(".") + "."
