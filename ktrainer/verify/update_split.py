"""How many parts an update is split into: ranks, replicas, microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from ktrainer.config import Config, PipelineConfig
from ktrainer.plan.run_plan import Plan


@dataclass(frozen=True)
class Split:
    """The split of an update.

    Attributes:
        replicas: copies of the model: ranks, devices, or groups of ranks.
        microbatches: parts of a replica's batch in a pipeline.
        accumulate: batches an update.
    """

    replicas: int = 1
    microbatches: int = 1
    accumulate: int = 1

    @property
    def parts(self) -> int:
        return self.replicas * self.microbatches * self.accumulate

    @property
    def in_turn(self) -> int:
        """Parts that a replica computes one after another."""
        return self.microbatches * self.accumulate

    def __str__(self) -> str:
        of = {
            "ranks or replicas": self.replicas,
            "microbatches": self.microbatches,
            "accumulated batches": self.accumulate,
        }
        return " and ".join(f"{n} {name}" for name, n in of.items() if n > 1)


def split_of(config: Config, plan: Plan) -> Split:
    """How a configuration splits an update."""
    backend, replicas = config.backend, plan.replicas
    if plan.strategy is not None:
        replicas = plan.strategy.processes
        if plan.strategy.strategy != "parameter_server":
            replicas *= max(1, len(plan.strategy.devices))
    microbatches = backend.microbatches if isinstance(backend, PipelineConfig) else 1
    return Split(replicas, microbatches, config.trainer.accumulate)
