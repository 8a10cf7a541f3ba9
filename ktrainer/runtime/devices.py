"""This process's device: one GPU by local rank, memory growth on, and its threads."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ktrainer.errors import SetupError

if TYPE_CHECKING:
    from ktrainer.distributed import World

# TensorFlow's log says so too, but is off by default.
_NO_GPU = (
    "this host has a GPU, but TensorFlow finds none and trains on the CPU: it could not load its "
    "CUDA libraries, or they do not fit the driver. Install them with TensorFlow (pip install "
    '"tensorflow[and-cuda]"); TF_CPP_MIN_LOG_LEVEL=0 shows what is missing. To train on the CPU '
    "without this warning, set CUDA_VISIBLE_DEVICES=-1."
)


def claim_device(
    world: World, threads: int | None = None, each: int = 1, expects_gpu: bool = False
) -> None:
    """Let this process see its own GPUs only, growing their memory as needed.

    Args:
        world: the ranks; `local_rank` picks the GPUs.
        threads: threads for one operation; None leaves TensorFlow's own choice.
        each: GPUs of a process, where there are several processes.
        expects_gpu: warn, on one process of a host, if TensorFlow finds no GPU.

    Raises:
        SetupError: TensorFlow was already running with other devices.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if expects_gpu and not gpus and world.local_rank == 0:
        warnings.warn(_NO_GPU, stacklevel=2)
    if gpus and (world.size > 1 or world.heals):
        # A launcher may show each rank its own GPU only; and ranks may share GPUs, as the plan
        # notes, unless NCCL is used, which the plan refuses.
        first = world.local_rank * each
        gpus = [gpus[i % len(gpus)] for i in range(first, first + each)]
        _configure(tf.config.set_visible_devices, gpus, "GPU")
    for gpu in gpus:
        _configure(tf.config.experimental.set_memory_growth, gpu, True)
    if threads:
        # Collectives block one thread each while the rest of a step continues.
        _configure(tf.config.threading.set_intra_op_parallelism_threads, threads, optional=True)
        _configure(
            tf.config.threading.set_inter_op_parallelism_threads, max(2, threads), optional=True
        )


def accelerator() -> str | None:
    """The device that this process's steps run on, if that is not the CPU."""
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        return None  # without starting TensorFlow
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[0].name if gpus else None


def _configure(setting: Any, *args: Any, optional: bool = False) -> None:
    try:
        setting(*args)
    except RuntimeError as error:
        if not optional:
            raise SetupError(
                "TensorFlow was already using its devices when the Trainer was made. Make the "
                f"Trainer first, then the model and the data. ({error})"
            ) from error
