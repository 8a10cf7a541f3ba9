"""The report of `ktrainer plan --world`: the step time of several numbers of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.config import DataParallelConfig, PipelineConfig, TfDistributeConfig
from ktrainer.config.pipeline_checks import effective_pipeline
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import ConfigError
from ktrainer.plan.communication_cost import Group, Link, Network
from ktrainer.plan.run_plan import Plan, make_plan
from ktrainer.plan_report.planning_mode import PlanPrinted, ScalingRequest
from ktrainer.plan_report.rendering import bytes_text, table
from ktrainer.plan_report.scaling_model import (
    Communication,
    Hosts,
    PredictedStep,
    predict,
    predict_pipeline,
)
from ktrainer.runtime.hardware import Hardware, available_cpus

if TYPE_CHECKING:
    from ktrainer.training.context import RunContext

_Predicted = Callable[[int, int], PredictedStep | None]  # of processes, of which so many are timed
_SHORT = 0.025  # seconds of a step of which `steps_per_call: auto` puts several into a call


def show_scaling(context: RunContext, model: Any, data: Any, request: ScalingRequest) -> NoReturn:
    """Measure on all ranks, write the report on rank 0, and end the script.

    Raises:
        ConfigError, ModelError, DataError: what cannot be trained, or predicted, so.
        PlanPrinted: always, at the end.
    """
    from ktrainer.plan_report.network_measurement import measure_network

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
    given = (
        Link(request.latency, 1 / request.bandwidth)
        if request.latency is not None and request.bandwidth
        else None
    )
    network = measure_network(world, given)
    communication = Communication(
        network,
        "horovod" if plans[-1].engine == "horovod" else "mpi",
        getattr(config.backend, "hierarchical", None) is not False,
    )
    here = _measuring_hosts(context, hosts)
    # Times of single stages are those of a process with cores of its own.
    sharing = not isinstance(config.backend, PipelineConfig)
    timed = {each: hosts.measuring(each, here, sharing=sharing) for each in worlds}
    steps = _predictions(context, model, data, timed, hosts, here, communication)
    if world.is_root:
        text = _report(context, request, plans, steps, max(timed.values()), network, given is None)
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


def _plan(context: RunContext, request: ScalingRequest, processes: int) -> Plan:
    """The plan for so many processes, which are refused where they cannot run."""
    facts = Hardware.detect(context.world)
    on_host = min(processes, request.per_host)
    return make_plan(
        context.config, replace(facts, size=processes, local_size=on_host, own_gpu=None)
    )


def _predictions(
    context: RunContext,
    model: Any,
    data: Any,
    timed: Mapping[int, int],
    hosts: Hosts,
    here: Hosts,
    communication: Communication,
) -> list[PredictedStep]:
    """The steps, on rank 0; all ranks measure them.

    Args:
        timed: numbers of processes, and how many of them a host times at once.
        hosts: planned for.
        here: the hosts that measure.
    """
    from ktrainer.plan_report.scaling_measurement import RecordingGradients, alone

    backend = context.config.backend
    recorder = RecordingGradients(
        alone(context.world),
        compression=backend.wire
        if isinstance(backend, DataParallelConfig)
        else getattr(backend, "compression", "none"),
        sparse_as_dense=getattr(backend, "sparse_as_dense", False),
    )
    predicted = (
        _pipeline(context, model, data, recorder, hosts, communication)
        if isinstance(backend, PipelineConfig)
        else _data_parallel(context, model, data, recorder, hosts, here, communication)
    )
    steps = [predicted(processes, at_once) for processes, at_once in timed.items()]
    return [step for step in steps if step is not None]


def _measuring_hosts(context: RunContext, hosts: Hosts) -> Hosts:
    """The hosts that measure, on all ranks alike: the fewest cores, the most processes."""
    every = context.world.allgather((context.world.local_size, len(available_cpus())))
    most, cores = max(size for size, _ in every), min(count for _, count in every)
    return replace(hosts, per_host=most, cores=cores or hosts.cores)


def _data_parallel(
    context: RunContext,
    model: Any,
    data: Any,
    recorder: Any,
    hosts: Hosts,
    here: Hosts,
    communication: Communication,
) -> _Predicted:
    from ktrainer.plan_report.scaling_measurement import measure_step

    programs: dict[Any, dict[bool, Any]] = {}
    is_root, backend = context.world.is_root, context.config.backend
    assert isinstance(backend, DataParallelConfig)

    def predicted(processes: int, at_once: int) -> PredictedStep | None:
        several = processes > 1
        group = Group.of(range(processes), hosts.per_host)
        sizes = recorder.set_buckets(backend, group, communication.network.between)
        if sizes not in programs:
            programs[sizes] = _programs(context, model, recorder)
        program, reduces = programs[sizes][several], recorder if several else None

        def train(feed: Any) -> Any:
            program.build(feed.spec)
            return program.train

        step = measure_step(context, data, train, reduces, replicas=processes, at_once=at_once)
        step = replace(step, crowding=here.crowding(at_once))
        return predict(step, processes, hosts, communication) if is_root else None

    return predicted


def _programs(context: RunContext, model: Any, recorder: Any) -> dict[bool, Any]:
    """The steps of one process, and of one of several."""
    from ktrainer.steps import CompiledProgram
    from ktrainer.steps.local_layers import set_local_layers
    from ktrainer.steps.powersgd import set_powersgd
    from ktrainer.training.fit_settings import step_options

    set_local_layers(model, getattr(context.config.backend, "local_layers", ()))
    set_powersgd(model, getattr(context.config.backend, "low_rank", None))
    options = step_options(context.config)
    return {
        several: CompiledProgram(model, options, recorder if several else None)
        for several in (False, True)
    }


def _pipeline(
    context: RunContext,
    model: Any,
    data: Any,
    recorder: Any,
    hosts: Hosts,
    communication: Communication,
) -> _Predicted:
    from ktrainer.plan_report.scaling_measurement import measure_step
    from ktrainer.plan_report.scaling_stages import TimedStages

    config = context.config
    backend = config.backend
    assert isinstance(backend, PipelineConfig)
    keys = effective_pipeline(config, backend)
    stages = TimedStages(context, model, recorder)

    def predicted(processes: int, at_once: int) -> PredictedStep | None:
        replicas = processes // keys.partitions
        step = measure_step(
            context, data, stages.train, recorder, replicas=replicas, at_once=at_once
        )
        if not context.world.is_root:
            return None
        schedule = make_schedule(
            keys.schedule,
            keys.partitions,
            max(1, min(keys.microbatches, int(step.batch))) * config.trainer.accumulate,
            keys.chunks,
            keys.active_microbatches,
        )
        layout = Layout(keys.partitions, replicas, keys.placement)
        return predict_pipeline(stages.stages(step), layout, schedule, hosts, communication)

    return predicted


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
    parts = ("compute", "stragglers", "all-reduce", "bubble", "input", "step ms")
    last = ("examples/s", "speed-up", "efficiency")
    rows: list[Sequence[str]] = [("world", "hosts", "batch", *parts, *last)]
    first = steps[0]
    for step in steps:
        waits = (step.stragglers, step.all_reduce, step.bubble, step.input)
        faster = step.examples_per_second / first.examples_per_second
        rows.append(
            (
                str(step.processes),
                str(step.hosts),
                f"{step.batch:g}",
                *(f"{1e3 * part:.2f}" for part in (step.compute, *waits, step.seconds)),
                f"{step.examples_per_second:.0f}",
                f"{faster:.2f}",
                f"{100 * faster * first.processes / step.processes:.0f}%",
            )
        )
    return table(rows)
