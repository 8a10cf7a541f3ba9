"""Inputs of a partition: what each node costs and reads, and how stages are weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ktrainer.errors import ConfigError


class Held(NamedTuple):
    """Microbatches of which a stage holds activations at once.

    Attributes:
        received: what came in over the cut.
        made: what its nodes have made.
    """

    received: int
    made: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: its size, and whether it is trained. The same one may be read by many nodes."""

    name: str
    bytes: int
    parameters: int = 0
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Costs and sizes of a node.

    Attributes:
        name: unique.
        cost: compute time of a microbatch, forward and backward, in any unit.
        inputs: names of the tensors it needs; those that no node makes are the model's inputs,
            which every process has anyway, so they cross no cut.
        outputs: names of the tensors that it makes.
        variables: those that it reads.
    """

    name: str
    cost: float
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Weights and limits of a partition.

    Attributes:
        optimize: `"speed"` or `"memory"`; sets `memory_weight` to 0.2 or 0.8.
        memory_weight: 0 balances time only, 1 memory only.
        memory_limit: bytes that a stage may take, or None.
        time_per_byte: time that a byte takes to cross a cut, in the unit of the costs. A stage
            is charged for the cut behind it, forward and backward together.
        state_factor: bytes in memory for each byte of a trainable variable: 4 for Adam (the
            variable, its gradient, two slots). Other variables take their own size.
        in_flight: microbatches whose activations a stage holds at once: one number, or one for
            each stage (1F1B: partitions - stage).
        whole: how many of them it holds with all activations, and not only what it received, under
            recomputation. None: all.
    """

    optimize: str = "speed"
    memory_weight: float | None = None
    memory_limit: int | None = None
    time_per_byte: float = 0.0
    state_factor: float = 4.0
    in_flight: int | tuple[int, ...] = 1
    whole: int | tuple[int, ...] | None = None

    @property
    def weight(self) -> float:
        """The effective weight of memory."""
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.2 if self.optimize == "speed" else 0.8

    def check(self) -> None:
        """Raise a ConfigError for a value that makes no sense."""
        if self.optimize not in ("speed", "memory"):
            raise ConfigError(
                f"must be 'speed' or 'memory', but is {self.optimize!r}.",
                path="backend.optimize",
                value=self.optimize,
                known=("speed", "memory"),
            )
        if not 0 <= self.weight <= 1:
            raise ConfigError(
                f"must be from 0 (balance time only) to 1 (memory only), but is {self.weight}. "
                f"The nearest legal value is {min(1, max(0, self.weight))}.",
                path="backend.memory_weight",
            )

    def held(self, stages: int) -> tuple[Held, ...]:
        """Microbatches that each of `stages` stages holds at once."""
        flying = _for_each("in_flight", self.in_flight, stages)
        whole = flying if self.whole is None else _for_each("whole", self.whole, stages)
        return tuple(Held(*pair) for pair in zip(flying, whole, strict=True))


def _for_each(name: str, given: int | tuple[int, ...], stages: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given,) * stages
    if len(given) != stages:
        raise ValueError(f"{name} has {len(given)} numbers for {stages} stages")
    return given
