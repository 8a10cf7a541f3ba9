"""Tensors arrive as they left, through copies on the host or from memory to memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

from ktrainer.backends.pipeline.runtime import message_buffers, transport
from ktrainer.backends.pipeline.runtime.message_buffers import (
    DeviceBuffers,
    HostBuffers,
    MessageBuffers,
)
from ktrainer.backends.pipeline.stage.tensor_memory import address_of
from ktrainer.distributed import mpi_chunks
from tests.pipeline.equal import Case, Outcome, local, pipeline, same, train

BUFFERS = [HostBuffers(), DeviceBuffers()]
TYPES = (tf.float64, tf.float32, tf.bfloat16, tf.float16, tf.int64, tf.int32, tf.uint8, tf.bool)


def _through(which: MessageBuffers, tensor: tf.Tensor) -> tf.Tensor:
    """What arrives when this process sends a tensor to itself."""
    comm = MPI.COMM_SELF
    coming, going = which.allocate(tf.TensorSpec(tensor.shape, tensor.dtype)), which.pack(tensor)
    receives = [comm.Irecv(piece, 0, 1) for piece in coming.pieces]
    sends = [comm.Isend(piece, 0, 1) for piece in going.pieces]
    MPI.Request.Waitall([*receives, *sends])
    return which.unpack(coming)


@pytest.mark.parametrize("which", BUFFERS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)], ids=str)
def test_bits_shape_and_type_stay(
    which: MessageBuffers, dtype: tf.DType, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).normal(size=shape) * 50
    sent = tf.cast(tf.constant(values), dtype)
    got = _through(which, sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.numpy().tobytes() == sent.numpy().tobytes()


@pytest.mark.parametrize("which", BUFFERS, ids=lambda w: type(w).__name__)
def test_more_than_a_message_holds_goes_in_pieces(
    which: MessageBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_chunks, "MOST_BYTES", 64)
    sent = tf.random.normal((7, 9))
    assert len(which.pack(sent).pieces) == 4
    np.testing.assert_array_equal(_through(which, sent), sent)


def test_memory_that_is_received_into_is_not_shared() -> None:
    spec = tf.TensorSpec((4,), tf.float32)
    made = [DeviceBuffers().allocate(spec) for _ in range(3)]
    assert len({address_of(message.owner) for message in made}) == 3


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]], ids=["no GPU", "a GPU"])
@pytest.mark.parametrize("aware", [False, True], ids=["plain MPI", "CUDA-aware MPI"])
def test_device_memory_needs_a_gpu_and_an_mpi_that_knows_it(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], aware: bool
) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    monkeypatch.setattr(message_buffers, "mpi_is_cuda_aware", lambda: aware)
    assert isinstance(
        message_buffers.make_buffers(), DeviceBuffers if gpus and aware else HostBuffers
    )


def test_mpi_says_itself_whether_it_is_cuda_aware() -> None:
    info = Path(sys.executable).parent / "ompi_info"
    if "Open MPI" not in MPI.Get_library_version() or not info.exists():
        assert message_buffers.mpi_is_cuda_aware() in (True, False)
        return
    said = subprocess.run([info, "--parsable", "--all"], capture_output=True, text=True, check=True)
    built = "opal_built_with_cuda_support:value:true" in said.stdout
    assert message_buffers.mpi_is_cuda_aware() == built


def _tell_each_other(most_bytes: int) -> Any:
    from ktrainer import distributed
    from ktrainer.backends.pipeline.runtime.transport import Transport

    whole, mpi_chunks.MOST_BYTES = mpi_chunks.MOST_BYTES, most_bytes
    try:
        here = distributed.current_world()
        transport, other = Transport(here, 2), 1 - here.rank
        said = np.arange(1000.0) * (1 + here.rank)
        if here.rank == 0:
            transport.send_object(said, other, "numbers")
            return transport.receive_object(other, "numbers")
        heard = transport.receive_object(other, "numbers")
        transport.send_object(said, other, "numbers")
        return heard
    finally:
        mpi_chunks.MOST_BYTES = whole


@pytest.mark.exhaustive
def test_what_is_told_may_be_larger_than_a_message(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(_tell_each_other, 64)
    np.testing.assert_array_equal(first, np.arange(1000.0) * 2)
    np.testing.assert_array_equal(second, np.arange(1000.0))


def _from_memory_to_memory(case: Case, words: tuple[str, ...]) -> Outcome:
    make = transport.make_buffers
    transport.make_buffers = DeviceBuffers  # on a machine without GPUs it is the host's memory
    try:
        return train(case, words)
    finally:
        transport.make_buffers = make


@pytest.mark.exhaustive
def test_a_pipeline_without_copies_gives_the_same_numbers(ranks: Callable[..., Any]) -> None:
    case = Case("masked", rows=38, epochs=2)
    words = pipeline(2, "backend.microbatches=4")
    same(local(case), ranks(2).run(_from_memory_to_memory, case, words, deadline=150))
