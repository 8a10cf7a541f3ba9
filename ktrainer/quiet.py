"""Keep TensorFlow's start-up messages off the screen; it reads these settings when imported."""

from __future__ import annotations

import os
import sys


def quiet_tensorflow() -> None:
    """Hide TensorFlow's C++ log unless the user has set its level; name Keras' backend."""
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
