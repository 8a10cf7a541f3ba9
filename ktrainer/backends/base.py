"""The one abstraction: a backend turns a model into a program that every rank can run.

The loop owns *when* something happens, a backend owns *how* a step runs, Keras owns *what* a
step is. A new backend is one file with one class, one line in `ktrainer.backends.BACKENDS`, one
dataclass in the configuration's schema and one YAML in `configs/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ktrainer.backends.devices import claim_device

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config
    from ktrainer.plan import Plan
    from ktrainer.steps import Program, StepOptions
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
        claim_device(world, threads=plan.threads)

    @abstractmethod
    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        """The compiled steps of `model`, nothing run yet."""

    @property
    def communication_seconds(self) -> float | None:
        """Seconds this rank has waited in gradient communication so far; None if unknown."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - not every backend holds something
        """Let go of what the backend holds. May be called twice."""
