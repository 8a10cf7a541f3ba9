"""The Trainer of a script that makes none, from the words of `ktrainer run`."""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from typing import TYPE_CHECKING

from ktrainer.script.imports import AfterImport, is_importing

if TYPE_CHECKING:
    from ktrainer.script.routing import Routing

_BACKEND = "KERAS_BACKEND"
_routing: Routing | None = None
_first = True


def prepare(rank: int, seed: int | None, horovod: bool) -> None:
    """Have training go through a Trainer as soon as the script imports TensorFlow or Keras.

    The Trainer is made then, before TensorFlow runs anything: it chooses devices.

    Args:
        rank: this process's.
        seed: of all random numbers, the same on all ranks; None leaves them alone.
        horovod: whether the script imports Horovod.
    """
    global _first
    _first = rank == 0
    if seed is not None:
        random.seed(seed)
        AfterImport("numpy", partial(_seed_numpy, seed))
    start = partial(_start, seed, horovod)
    AfterImport("tensorflow", partial(_unless_importing, "keras", start))
    AfterImport("keras", partial(_unless_importing, "tensorflow", start), before=_on_tensorflow)


def say(text: str) -> None:
    """A line on rank 0's standard error."""
    if _first:
        print(f"ktrainer run: {text}", file=sys.stderr, flush=True)


def _unless_importing(other: str, start: partial[None]) -> None:
    # TensorFlow and Keras import one another: the outer one of them comes to its end last.
    if not is_importing(other):
        start()


def _start(seed: int | None, horovod: bool) -> None:
    global _routing
    if _routing is not None:
        return
    from ktrainer.trainer import Trainer

    trainer = Trainer.from_cli(argv=())
    if seed is not None:
        _seed_keras(seed)
    from ktrainer.script.routing import Routing

    _routing = Routing(trainer)
    if horovod:
        say(
            "the script imports Horovod, which ktrainer does not need: delete hvd.init(), "
            "hvd.DistributedOptimizer, hvd.callbacks and what depends on hvd.rank() or hvd.size(), "
            "such as a scaled learning rate"
        )


def _seed_numpy(seed: int) -> None:
    import numpy as np
    from numpy.random import bit_generator

    np.random.seed(seed)
    # Generators without a seed, such as default_rng(), draw theirs here.
    vars(bit_generator)["randbits"] = random.Random(seed).getrandbits


def _seed_keras(seed: int) -> None:
    """Seed Keras and TensorFlow; Python and NumPy keep what the script may have set already."""
    import keras
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    keras.utils.set_random_seed(seed)
    random.setstate(python)
    np.random.set_state(numpy)


def _on_tensorflow() -> None:
    asked = os.environ.get(_BACKEND)
    if asked not in (None, "tensorflow"):
        say(f"the script asks for Keras on {asked}; it runs on TensorFlow")
    os.environ[_BACKEND] = "tensorflow"
