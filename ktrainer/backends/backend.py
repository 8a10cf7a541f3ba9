"""Abstract backend: turns a model into compiled steps that every rank can run.

The loop owns *when* something happens, a backend owns *how* a step runs, Keras owns *what* a
step is. A new backend is one file with one class, one line in `ktrainer.backends.BACKENDS`, one
dataclass and one line in `BACKENDS` in `ktrainer.config.backend_keys`, and one YAML in `configs/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ktrainer.config.command_line import require_taken_words
from ktrainer.errors import ConfigError
from ktrainer.runtime.devices import accelerator, claim_device

if TYPE_CHECKING:
    import keras

    from ktrainer.backends.user_loop import UserLoop
    from ktrainer.config import Config
    from ktrainer.distributed import World
    from ktrainer.plan.run_plan import Plan
    from ktrainer.steps import Program, StepOptions


class Backend(ABC):
    """Abstract way to run steps on this rank.

    Args:
        config: the resolved configuration.
        plan: what the configuration means here.
        world: the ranks.

    Attributes:
        name: as in the configuration.
        strategy: the `tf.distribute.Strategy` that steps run under; None: there is none.
    """

    name: str
    strategy: Any = None

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        self.config, self.plan, self.world = config, plan, world
        world.assign_replica(world.rank, world.size)  # an earlier backend may have set another
        self.claim_devices()

    def claim_devices(self) -> None:
        """Take this process's devices, before TensorFlow starts."""
        claim_device(self.world, self.plan.threads, expects_gpu=self.plan.device == "gpu")

    def build_model(self, build: Callable[[], Any]) -> Any:
        """Call the user's function that makes the model."""
        with self.scope():
            return build()

    @property
    def input_device(self) -> str | None:
        """The device that needs all of this rank's batches, which are copied there while the step
        before runs; None: the CPU, or several devices."""
        return accelerator()

    @abstractmethod
    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        """The steps of `model`; compiles and runs nothing yet."""

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:  # noqa: B027
        """Refuse callbacks that do not work with this backend."""

    def watching(self) -> AbstractContextManager[None]:
        """Context for everything the Trainer does with a model, parts of which other processes may
        hold."""
        return nullcontext()

    @cached_property
    def loop(self) -> UserLoop:
        """How the steps of a loop of the user's own run.

        Raises:
            ConfigError: they cannot, or no Trainer of the script has the words of the launch.
        """
        require_taken_words()
        return self.open_loop()

    def scope(self) -> AbstractContextManager[Any]:
        """Context in which models, optimizers and metrics are made, if they need one."""
        return nullcontext()

    def open_loop(self) -> UserLoop:
        """Make `loop`, when it is first needed."""
        raise ConfigError(
            f"a loop of your own cannot run under {self.name}, which splits the model itself. Let "
            "trainer.fit run the steps, with the model's own train_step where it must be special; "
            "or choose backend=data_parallel, tf_distribute or local.",
            path="backend",
            value=self.name,
        )

    @property
    def communication_seconds(self) -> float | None:
        """Seconds that this rank has waited in gradient communication so far; None if unknown."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - not every backend holds something
        """Release communicators and devices. May be called twice."""
