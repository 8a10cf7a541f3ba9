"""The one abstraction: a backend turns a model into a program that every rank can run.

The loop owns *when* something happens, a backend owns *how* a step runs, Keras owns *what* a
step is. A new backend is one file with one class, one line in `ktrainer.backends.BACKENDS`, one
dataclass and one line in `BACKENDS` in `ktrainer.config.backends`, and one YAML in `configs/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ktrainer.backends.devices import claim_device

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config
    from ktrainer.plan import Plan
    from ktrainer.steps import StepOptions, Steps
    from ktrainer.world import World


class Backend(ABC):
    """How steps run on this rank.

    Args:
        config: the resolved configuration.
        plan: what the configuration means here.
        world: the ranks.
    """

    name: str

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        self.config, self.plan, self.world = config, plan, world
        world.share_data(world.rank, world.size)  # whatever a backend before this one has set
        self.claim_devices()

    def claim_devices(self) -> None:
        """Take this process's devices, before TensorFlow starts."""
        claim_device(self.world, threads=self.plan.threads)

    def build_model(self, build: Callable[[], Any]) -> Any:
        """The model that a user's function makes."""
        return build()

    @abstractmethod
    def prepare(self, model: keras.Model, options: StepOptions) -> Steps:
        """The compiled steps of `model`, nothing run yet."""

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:  # noqa: B027
        """Refuse callbacks that cannot do their work here."""

    def watching(self) -> AbstractContextManager[None]:
        """In which whatever the Trainer does with a model runs; other processes, too, may hold
        parts of it."""
        return nullcontext()

    @property
    def communication_seconds(self) -> float | None:
        """Seconds this rank has waited in gradient communication so far; None if unknown."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - not every backend holds something
        """Let go of what the backend holds. May be called twice."""
