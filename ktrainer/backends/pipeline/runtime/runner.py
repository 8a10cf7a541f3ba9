"""Runner of a schedule: runs the actions of one rank in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ktrainer.backends.pipeline.runtime.tied_gradients import TiedGradients
from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.backends.pipeline.schedules.actions import Action, Schedule
from ktrainer.backends.pipeline.schedules.transfers import Transfers
from ktrainer.backends.pipeline.stage.compiled_stage import CompiledStage
from ktrainer.backends.pipeline.stage.global_loss import GlobalLoss
from ktrainer.backends.pipeline.stage.microbatches import Microbatch
from ktrainer.backends.pipeline.stage.py_functions import check_order
from ktrainer.backends.pipeline.stage.stage_functions import SavedTensors
from ktrainer.backends.pipeline.stage.stage_settings import Arguments
from ktrainer.state.trace_spans import STAGES, add_span

_AHEAD = 2  # receives are posted this many actions before they are needed


@dataclass
class Values:
    """The values of this process's variables during a step, by the variable's `id()`.

    Attributes:
        trainable: of those that are trained: the same in the whole step.
        state: of the others; each forward pass updates them for the next one.
    """

    trainable: Mapping[int, Any]
    state: dict[int, Any]


@dataclass
class StepOutcome:
    """Results of one step in this process.

    Attributes:
        results: on the last stage, for each microbatch, its flat logs or outputs.
        slices: for each variable with sparse gradients, values and indices in turn.
    """

    results: list[list[Any]] = field(default_factory=list)
    slices: dict[int, list[Any]] = field(default_factory=dict)


class Runner:
    """Runs schedules on the stages of this process.

    Args:
        transport: to and from the other stages.
        shared: gradients of variables that other partitions hold too.

    Attributes:
        on_action: is given each action and the seconds that it took, waits included.
    """

    on_action: Callable[[Action, float], None] | None = None

    def __init__(self, transport: Transport, shared: TiedGradients) -> None:
        self.transport, self.shared = transport, shared

    def run(
        self,
        schedule: Schedule,
        rank: int,
        microbatches: Sequence[Microbatch],
        compiled: Sequence[Sequence[CompiledStage]],
        values: Values,
        scale: float = 1.0,
        denominators: Any = None,
        global_loss: GlobalLoss | None = None,
    ) -> StepOutcome:
        """Run the actions of `rank`, this process's partition, in order.

        Args:
            compiled: for each microbatch, the stages of this process, in order.
            scale: what losses are multiplied by.
            denominators: float64 vector, what losses are divided by; on the last stage.
            global_loss: computes the loss, once the last stage has run all microbatches forward; on
                the last stage.

        Raises:
            ModelError: a Python function would be differentiated for the wrong microbatch.
        """
        step = _Step(
            self.transport,
            schedule,
            microbatches,
            compiled,
            values,
            scale,
            denominators,
            global_loss,
        )
        row = schedule.actions[rank]
        check_order(row, step.stage)
        last = {id(v): place for place, a in enumerate(row) for v in step.added_by(a)}
        for place, action in enumerate(row):
            step.post_receive(row[place + _AHEAD if place else 0 : place + _AHEAD + 1])
            self._run_action(step, action, schedule.label(action))
            for variable in self.shared.variables:
                if last.get(id(variable)) == place:
                    self.shared.complete(variable, step.outcome.slices)
            self.shared.progress()
        step.complete_loss()
        self.transport.finish()
        return step.outcome

    def _run_action(self, step: _Step, action: Action, label: str) -> None:
        """Run an action, and record the time that it took."""
        start = time.perf_counter()
        getattr(step, _METHODS[action.kind])(action)
        if self.on_action is not None:
            tf.test.experimental.sync_devices()  # a GPU's kernels run on after the call
        end = time.perf_counter()
        add_span(STAGES, label, start, end)
        if self.on_action is not None:
            self.on_action(action, end - start)


_METHODS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


class _Step:
    """One run of a schedule."""

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        compiled: Sequence[Sequence[CompiledStage]],
        values: Values,
        scale: float,
        denominators: Any,
        global_loss: GlobalLoss | None,
    ) -> None:
        self.transport, self._compiled, self._ranks = transport, compiled, schedule.ranks
        self.transfers = Transfers(schedule)
        self.microbatches, self.values = microbatches, values
        self._scale = scale
        self.denominators = denominators
        self.outcome = StepOutcome()
        self._kept: dict[tuple[int, int], SavedTensors] = {}
        self._global_loss = global_loss
        self._sent: dict[int, list[Any]] = {}  # by the last stage, for the loss of the whole
        self._of_outputs: list[list[Any]] = []

    def stage(self, action: Action) -> CompiledStage:
        return self._compiled[action.microbatch][action.stage // self._ranks]

    def specs_of(self, action: Action) -> list[tf.TensorSpec]:
        """Specs of what an action receives."""
        stage = self.stage(action)
        return stage.receives if action.kind == "F" else stage.gradient_specs

    def post_receive(self, actions: Sequence[Action]) -> None:
        """Post the receives of some actions."""
        for action in actions:
            for transfer in self.transfers.receives(action):
                self.transport.post_receive(transfer, self.specs_of(action))

    def added_by(self, action: Action) -> Sequence[Any]:
        """The variables whose gradients an action may add to."""
        return self.stage(action).stage.trainable if action.kind in "BW" else ()

    def forward(self, action: Action) -> None:
        stage = self.stage(action)
        sent, state, results, kept = stage.forward(self._arguments(action, stage))
        if self._counts(action):
            self.values.state |= {id(v): x for v, x in zip(stage.changes, state, strict=True)}
        for transfer in self.transfers.sends(action):
            self.transport.send(transfer, sent)
        if stage.stage.is_last:
            self.outcome.results.append(results)
            self._sent[action.microbatch] = sent
        if stage.mode == "train":
            self._kept[action.stage, action.microbatch] = kept

    def backward(self, action: Action) -> None:
        stage = self.stage(action)
        kept = self._kept.pop((action.stage, action.microbatch))
        cotangents = self._received(action, stage.gradient_specs)
        gradients, slices = stage.backward(kept, cotangents, self._counts(action))
        self._send(action, gradients)
        self._keep_slices(stage, slices)

    def input_gradient(self, action: Action) -> None:
        stage = self.stage(action)
        kept = self._kept[action.stage, action.microbatch]
        cotangents = self._received(action, stage.gradient_specs)
        self._send(action, stage.input_gradient(kept, cotangents))

    def weight_gradient(self, action: Action) -> None:
        stage = self.stage(action)
        kept = self._kept.pop((action.stage, action.microbatch))
        self._keep_slices(stage, stage.weight_gradient(kept, self._counts(action)))

    def _counts(self, action: Action) -> bool:
        """False for padding, which changes no state and adds no gradients."""
        return self.microbatches[action.microbatch].weight != 0

    def _arguments(self, action: Action, stage: CompiledStage) -> Arguments:
        microbatch = self.microbatches[action.microbatch]
        received = self._received(action, stage.receives)
        if not action.stage:  # no losses so far
            received = [tf.constant(0, stage.receives[-1].dtype)]
        seed = self._scale * (microbatch.weight if stage.weighs_losses else 1.0)
        return Arguments(
            trainable=[self.values.trainable[id(v)] for v in stage.stage.trainable],
            state=[self.values.state[id(v)] for v in stage.state],
            received=received,
            data=stage.data_of(microbatch),
            scalars=[tf.constant(x, tf.float64) for x in (microbatch.weight, seed)],
            denominators=[self.denominators] if stage.specs.denominators else [],
        )

    def complete_loss(self) -> None:
        """Compute the loss of the whole batch, once."""
        if self._global_loss is None or not self._sent:
            return
        stages = [stages[-1] for stages in self._compiled]
        sent = [self._sent.pop(k) for k in range(len(self.microbatches))]
        trainable, state = self.values.trainable, self.values.state
        self._of_outputs = self._global_loss(
            stages, sent, self.microbatches, trainable, state, self._scale
        )

    def _received(self, action: Action, specs: Sequence[tf.TensorSpec]) -> list[Any]:
        if (
            self._global_loss is not None
            and action.kind in "BI"
            and self.stage(action).stage.is_last
        ):
            self.complete_loss()
            return self._of_outputs[action.microbatch]
        return [
            tensor
            for transfer in self.transfers.receives(action)
            for tensor in self.transport.receive(transfer, specs)
        ]

    def _send(self, action: Action, gradients: Sequence[Any]) -> None:
        for transfer in self.transfers.sends(action):
            self.transport.send(transfer, gradients)

    def _keep_slices(self, stage: CompiledStage, slices: Sequence[Any]) -> None:
        pairs: Iterator[Any] = iter(slices)
        for variable in stage.sparse:
            kept = self.outcome.slices.setdefault(id(variable), [])
            kept += [next(pairs), next(pairs)]
