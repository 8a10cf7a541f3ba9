"""Bring Keras and TensorFlow back to how they start, without importing them."""

from __future__ import annotations

import gc
import sys


def reset() -> None:
    """Undo what a test may have set: names, float type, dtype policy, seeds, eager mode.

    Does nothing in a process that has not loaded Keras.
    """
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "utils"):
        return
    import tensorflow as tf
    from tensorflow.python.framework import config as framework_config

    clear()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    tf.random.set_seed(None)  # as at the start: operations without a seed draw one each
    tf.config.run_functions_eagerly(False)
    tf.config.optimizer.set_jit("")
    # There is no public way back from `enable_op_determinism`.
    framework_config.disable_op_determinism()


def clear() -> None:
    """Forget the names of models so far, and free them."""
    import keras

    keras.utils.clear_session()
    # What has outlived its collection (TensorFlow's modules above all) stays: looking through it
    # again after every test would take longer than most tests do.
    gc.freeze()
