"""A tf.data service for scripts: send pipelines to it, open a dispatcher.

Everything before `send_to_data_service` runs in the workers of `ktrainer data-service`, everything
after it in the training process. Names and arguments are those of `horovod.tensorflow.data`.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ktrainer.config.data_service_file import (
    TfDataServiceConfig,
    check_size,
    dispatcher_file,
    is_reachable,
    write_json,
)
from ktrainer.config.launch_environment import LOOPBACK
from ktrainer.data.dataset_source import calls_python
from ktrainer.distributed.listening_sockets import keep_at
from ktrainer.errors import ConfigError, DataError, SetupError

_MODES = ("distributed_epoch", "parallel_epochs")


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """A dataset whose elements the tf.data service computes.

    Args:
        dataset: what the workers run.
        compute_config: the service, with its dispatchers on the compute side.
        rank, size: this training process, and how many there are.
        processing_mode: `distributed_epoch`: the workers share the elements, each is computed once.
            `parallel_epochs`: each worker computes all of them.
        reuse_dataset: all training processes read from one computation, instead of one each.
        round_robin: with `reuse_dataset`, in turns, instead of first come first served. Needs a
            dataset without end: `dataset.repeat()`.

    Raises:
        ConfigError: numbers or options that do not fit together.
        DataError: a dataset that calls Python, or round robin of one that ends.
        SetupError: the dispatchers are to run in the training processes, or do not answer.
    """
    if compute_config.dispatcher_side != "compute":
        raise SetupError(
            "the service was started with --dispatcher-side training. Open its dispatcher with "
            "`with data_service(config, rank) as address:` and apply "
            "tf.data.experimental.service.distribute(..., service=address) inside"
        )
    check_size(compute_config, size)
    check_options(compute_config, size, processing_mode, reuse_dataset, round_robin)
    require_sendable(dataset)
    if round_robin and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
        raise DataError(
            "round robin deals elements in full rounds, so the dataset must not end: send "
            "dataset.repeat(), and take as many elements as an epoch has"
        )
    address = compute_config.addresses[rank if compute_config.dispatchers > 1 else 0]
    _require_reachable(address, compute_config)
    return distribute(
        dataset,
        address,
        processing_mode,
        job="job" if reuse_dataset else None,
        consumer=(rank, size) if round_robin else None,
    )


def _require_reachable(address: str, config: TfDataServiceConfig) -> None:
    """Wait for a dispatcher that is being started again: TensorFlow itself would wait for ever."""
    end = time.monotonic() + config.timeout
    while not is_reachable(address):
        if time.monotonic() > end:
            raise SetupError(
                f"nothing has listened at {address} for {config.timeout:g} s, where {config.path} "
                "says that a dispatcher of the tf.data service is: the service has ended. Start it "
                f"again with `ktrainer data-service --config {config.path}`"
            )
        time.sleep(0.1)


def distribute(
    dataset: tf.data.Dataset,
    address: str,
    mode: Any,
    job: str | None = None,
    consumer: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """`dataset` as the service at `address` computes it.

    Args:
        mode: as TensorFlow's `processing_mode`.
        job: processes that name the same job share its elements.
        consumer: for round robin, this process's number and how many there are.
    """
    index, consumers = consumer or (None, None)
    return dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode=mode,
            service=f"grpc://{address}",
            job_name=job,
            consumer_index=index,
            num_consumers=consumers,
        )
    )


def check_options(
    config: TfDataServiceConfig, size: int, mode: str, reuse: bool, round_robin: bool
) -> None:
    """Refuse options that contradict one another.

    Raises:
        ConfigError: as said.
    """
    if mode not in _MODES:
        raise ConfigError(
            f"processing_mode={mode!r} is none of {', '.join(_MODES)}", value=mode, known=_MODES
        )
    if reuse and config.dispatchers > 1:
        raise ConfigError(
            f"reuse_dataset=True shares one dataset among {size} training processes, but the "
            f"service has {config.dispatchers} dispatchers, each with its own dataset: restart "
            "it with --dispatchers 1, or leave reuse_dataset out"
        )
    if round_robin and not reuse:
        raise ConfigError(
            "round_robin=True deals out a dataset that is shared: add reuse_dataset=True"
        )


def require_sendable(dataset: tf.data.Dataset) -> None:
    """Refuse a pipeline that runs only in this process.

    Raises:
        DataError: it calls Python.
    """
    if calls_python(dataset):
        raise DataError(
            "the dataset calls Python (from_generator, tf.py_function or tf.numpy_function), whose "
            "functions exist in this process only, so it cannot be sent to a tf.data service. Make "
            "it of TensorFlow's own operations (from_tensor_slices, TFRecordDataset, tf.io, "
            "tf.image), or apply the Python part after the service"
        )


@contextlib.contextmanager
def data_service(
    compute_config: TfDataServiceConfig, rank: int, address: str | None = None
) -> Iterator[str]:
    """The address of this process's dispatcher, for `tf.data.experimental.service.distribute`.

    On the training side the dispatcher is started here, and the workers of the compute job join it.
    Its end ends the datasets that are read from it.

    Args:
        compute_config: as read from the file of the service.
        rank: this training process.
        address: the address under which workers reach this host; None: 127.0.0.1 if the service
            runs on this host alone. Where it listens.

    Raises:
        ConfigError: there is no dispatcher of this number.
    """
    several = compute_config.dispatchers > 1
    if several and rank >= compute_config.dispatchers:
        raise ConfigError(
            f"there are {compute_config.dispatchers} dispatchers, so rank {rank} has none: start "
            f"the service with --dispatchers {rank + 1} or more, one for each training process"
        )
    number = rank if several else 0
    if compute_config.dispatcher_side == "compute":
        yield f"grpc://{compute_config.addresses[number]}"
        return
    place = dispatcher_file(compute_config.path, number)
    if not several and rank > 0:
        yield f"grpc://{_wait_for_address(compute_config, number)}"
        return
    server = tf.data.experimental.service.DispatchServer(
        tf.data.experimental.service.DispatcherConfig(port=0)
    )
    port = server.target.rpartition(":")[2]
    own = address or LOOPBACK
    if not keep_at(own, (int(port),)):
        warnings.warn(f"the dispatcher at port {port} listens on all interfaces", stacklevel=3)
    found = f"{own}:{port}"
    write_json(place, found)
    try:
        yield f"grpc://{found}"
    finally:
        place.unlink(missing_ok=True)
        server._stop()


def _wait_for_address(config: TfDataServiceConfig, number: int) -> str:
    place, end = dispatcher_file(config.path, number), time.monotonic() + config.timeout
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            found = str(json.loads(place.read_text()))
            if is_reachable(found):  # else it is that of a job that was killed
                return found
        time.sleep(0.1)
    raise SetupError(
        f"rank 0 did not start its dispatcher within {config.timeout:g} s ({place} is missing, or "
        "that of a job that has ended): "
        "open data_service(config, rank) on rank 0 too"
    )
