"""The report of `ktrainer plan --world`: the step time of several numbers of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ktrainer.config import DataParallelConfig, PipelineConfig, TfDistributeConfig
from ktrainer.errors import ConfigError
from ktrainer.plan.communication_cost import Link, Network
from ktrainer.plan.run_plan import Plan, make_plan
from ktrainer.plan_report.planning_mode import PlanPrinted, ScalingRequest
from ktrainer.plan_report.rendering import bytes_text, table
from ktrainer.plan_report.scaling_model import Communication, Hosts, PredictedStep
from ktrainer.runtime.hardware import Hardware

if TYPE_CHECKING:
    from ktrainer.training.context import RunContext

_SHORT = 0.025  # seconds of a step of which `steps_per_call: auto` puts several into a call


def show_scaling(context: RunContext, model: Any, data: Any, request: ScalingRequest) -> NoReturn:
    """Measure on all ranks, write the report on rank 0, and end the script.

    Raises:
        ConfigError, ModelError, DataError: what cannot be trained, or predicted, so.
        PlanPrinted: always, at the end.
    """
    from ktrainer.plan_report.network_measurement import measure_network
    from ktrainer.plan_report.scaling_predictions import StepPredictions

    config, world = context.config, context.world
    if isinstance(config.backend, TfDistributeConfig):
        raise ConfigError(
            "--world: step times are predicted for the backends data_parallel and pipeline: the "
            "collectives of a strategy are TensorFlow's own.",
            path="backend",
            value=config.backend.name,
        )
    partitions = config.backend.partitions if isinstance(config.backend, PipelineConfig) else 1
    worlds = chosen_worlds(request.worlds, partitions)
    plans = [_plan(context, request, processes) for processes in worlds]
    hosts = Hosts(request.per_host, request.cores, request.threads)
    given = _given_link(request)
    network = measure_network(world, given)
    communication = Communication(
        network,
        "horovod" if plans[-1].engine == "horovod" else "mpi",
        getattr(config.backend, "hierarchical", None) is not False,
    )
    predictions = StepPredictions(context, model, data, hosts, communication)
    steps = predictions.steps(worlds)
    if world.is_root:
        timed = max(map(predictions.timed_at_once, worlds))
        text = _report(context, request, plans, steps, timed, network, given is None)
        Path(request.report).write_text(text, encoding="utf-8")
    world.barrier("end of the plan")
    raise PlanPrinted


def chosen_worlds(asked: Sequence[int], partitions: int) -> list[int]:
    """The numbers of processes: those asked for, or up to the only one, each twice the one before.

    Raises:
        ConfigError: one is no multiple of the partitions.
    """
    for processes in asked:
        if processes % partitions:
            near = max(partitions, processes - processes % partitions)
            raise ConfigError(
                f"--world: {processes} processes are no multiple of {partitions} partitions: ask "
                f"for {near}, for example.",
                path="backend.partitions",
                value=partitions,
            )
    if len(asked) > 1:
        return list(asked)
    doubled = (partitions * 2**k for k in range(math.ceil(math.log2(asked[0] / partitions)) + 1))
    return [*(size for size in doubled if size < asked[0]), asked[0]]


def _given_link(request: ScalingRequest) -> Link | None:
    """The link between hosts that was asked for; None to measure it."""
    if request.latency is None or not request.bandwidth:
        return None
    return Link(request.latency, 1 / request.bandwidth)


def _plan(context: RunContext, request: ScalingRequest, processes: int) -> Plan:
    """The plan for so many processes, which are refused where they cannot run."""
    facts = Hardware.detect(context.world)
    on_host = min(processes, request.per_host)
    return make_plan(
        context.config, replace(facts, size=processes, local_size=on_host, own_gpu=None)
    )


def _report(
    context: RunContext,
    request: ScalingRequest,
    plans: Sequence[Plan],
    steps: Sequence[PredictedStep],
    timed: int,
    network: Network,
    measured: bool,
) -> str:
    config, last = context.config, plans[-1]
    threads = "1 thread" if request.threads == 1 else f"{request.threads} threads"
    fixed = config.data.batch == "global"
    engine = f", engine {last.engine}" if last.engine else ""
    lines = [
        f"backend   {last.backend}{engine}",
        *([f"pipeline  {last.layout}"] if last.layout else []),
        f"processes {threads} each, at most {request.per_host} on a host of {request.cores} "
        f"core{'s' * (request.cores != 1)}",
        "batch     "
        + (
            "of all processes together: the same on any number of them (strong scaling)"
            if fixed
            else "of each replica: with their number grows the whole batch (weak scaling)"
        ),
        f"measured  steps of one process, up to {timed} at a time on a host",
        *_network(request, steps, network, measured),
        "",
        _table(steps),
    ]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    if isinstance(config.backend, DataParallelConfig) and _runs_several(config, steps):
        notes[
            "short steps run several in a call (trainer.steps_per_call), and faster than this."
        ] = None
    return "\n".join([*lines, *([""] if notes else []), *(f"note      {each}" for each in notes)])


def _runs_several(config: Any, steps: Sequence[PredictedStep]) -> bool:
    return config.trainer.steps_per_call != 1 and min(s.seconds for s in steps) < _SHORT


def _network(
    request: ScalingRequest, steps: Sequence[PredictedStep], network: Network, measured: bool
) -> list[str]:
    """The links that the processes use."""
    lines = []
    if request.per_host > 1 and steps[-1].processes > 1:
        lines.append(f"in a host {_link(network.within)}, measured")
    if max(step.hosts for step in steps) > 1:
        lines.append(
            f"network   {_link(network.between)}, {'measured' if measured else 'as given'}"
        )
    return lines


def _link(link: Link) -> str:
    rate = f"{bytes_text(1 / link.per_byte)}/s" if link.per_byte else "no limit"
    return f"{1e6 * link.latency:.3g} us, {rate}"


def _table(steps: Sequence[PredictedStep]) -> str:
    """The steps, in ms; speed-up and efficiency are those of examples a second."""
    times = ("compute", "stragglers", "communication", "bubble", "input", "step ms")
    last = ("examples/s", "speed-up", "efficiency")
    rows: list[Sequence[str]] = [("world", "hosts", "batch", *times, *last)]
    first = steps[0]
    for step in steps:
        waits = (step.stragglers, step.communication, step.bubble, step.input)
        faster = step.examples_per_second / first.examples_per_second
        rows.append(
            (
                str(step.processes),
                str(step.hosts),
                f"{step.batch:g}",
                *(f"{1e3 * seconds:.2f}" for seconds in (step.compute, *waits, step.seconds)),
                f"{step.examples_per_second:.0f}",
                f"{faster:.2f}",
                f"{100 * faster * first.processes / step.processes:.0f}%",
            )
        )
    return table(rows)
