"""Import TensorFlow and Keras and put them in the state that the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktrainer.errors import SetupError
from ktrainer.runtime.autograph import exclude_from_autograph
from ktrainer.runtime.symbol_check import check_symbols

if TYPE_CHECKING:
    from ktrainer.config import Config

REMEDY = (
    'in the checkout of ktrainer, pip install ".[cpu]" for CPUs, or pip install ".[gpu]" for '
    "NVIDIA GPUs"
)


_draws: Any = None  # TensorFlow makes new ones with each seed that is set


def seed_is_scripts() -> bool:
    """Whether the script has set TensorFlow's seed since the last Trainer was made."""
    from tensorflow.python.eager import context

    return context.global_seed() is not None and context.context()._rng is not _draws


def note_seed() -> None:
    """Take TensorFlow's seed of now for one that the script has not set."""
    global _draws
    from tensorflow.python.eager import context

    _draws = context.context()._rng


def start_tensorflow(config: Config) -> None:
    """Seeds, determinism and precision, before any model is made.

    The seed is the same on every rank: equal initial weights, and equal orders of data. What
    must differ, such as dropout masks, is made to differ inside the step.

    Raises:
        SetupError: TensorFlow is missing, Keras runs on another backend, or their versions are
            not supported.
    """
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise SetupError(f"TensorFlow is not installed. Install it: {REMEDY}") from None
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SetupError(
            f"Keras runs on {keras.backend.backend()!r}; ktrainer trains on TensorFlow. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is imported."
        )
    check_symbols()
    exclude_from_autograph()
    if config.seed is not None:
        keras.utils.set_random_seed(config.seed)
        note_seed()
    if config.trainer.deterministic:
        tf.config.experimental.enable_op_determinism()
    if config.trainer.precision is not None:
        keras.config.set_dtype_policy(config.trainer.precision)
