"""The report of `ktrainer plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ktrainer.backends.pipeline.schedules.actions import Schedule
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.schedules.timeline import Costs, Timeline, make_timeline
from ktrainer.config import Config, DataParallelConfig, DataServiceConfig, PipelineConfig
from ktrainer.config.pipeline_checks import effective_pipeline
from ktrainer.plan.run_plan import Plan, batch_notes, make_plan
from ktrainer.plan_report.planned_trace import add_plan
from ktrainer.plan_report.planning_mode import PlanPrinted, check_request, plan_request, pretend
from ktrainer.plan_report.rendering import bytes_text, draw, grid_text, table
from ktrainer.runtime.hardware import Hardware

if TYPE_CHECKING:
    from ktrainer.backends.pipeline.partition.stage_assignment import StageAssignment
    from ktrainer.backends.pipeline.planning import StagePlan
    from ktrainer.training.context import RunContext

_UNITS = {
    "flops": "operations of the forward pass",
    "profile": "seconds, forward and backward, measured here",
    "parameters": "parameters",
    "uniform": "layers and ops",
}


def show_config(config: Config) -> None:
    """Print what a configuration alone says: the plan, and a pipeline's schedule.

    Raises:
        ConfigError: it cannot run on so many processes.
    """
    from ktrainer.distributed import SingleWorld

    plan = make_plan(config, pretend(config, Hardware.detect(SingleWorld())))
    check_request(config)
    print(plan)
    if isinstance(config.backend, PipelineConfig):
        backend = effective_pipeline(config, config.backend)
        schedule = _schedule(config, backend, plan.rank_batches[0])
        _show_schedule(schedule, partial(equal_costs, schedule.stages), backend, plan)


def show_model(
    context: RunContext, model: Any, data: Any, callbacks: Iterable[Any] = ()
) -> NoReturn:
    """Print what `fit` would do with a model, and end the script.

    Args:
        context: its plan is for as many processes as asked for.
        model: that `fit` was given.
        data: the training data; looked at for shapes, not read through.
        callbacks: of the Trainer and of the call of `fit`.

    Raises:
        ConfigError, ModelError, DataError: what cannot be trained so.
        PlanPrinted: always, at the end.
    """
    from ktrainer.backends.pipeline.check_supported import refuse_callbacks
    from ktrainer.training.fit_settings import check_model

    config, request = context.config, plan_request()
    check_model(model, config)
    if request is not None and request.scaling is not None:
        from ktrainer.plan_report.scaling_report import show_scaling

        show_scaling(context, model, data, request.scaling)
    check_request(config)
    plan = _with_batch_of(data, context)
    print(plan)
    if isinstance(config.backend, PipelineConfig):
        inputs, share = _inputs(context, data), plan.rank_batches[0]
        refuse_callbacks(callbacks)
        backend = effective_pipeline(config, config.backend)
        _show_pipeline(model, inputs, share, config, backend, plan)
    else:
        _show_whole(model, getattr(config.backend, "local_layers", ()))
        if isinstance(config.backend, DataParallelConfig) and plan.size > 1 and model.built:
            _show_sent(model, config.backend, plan.size)
    raise PlanPrinted


def _show_whole(model: Any, local_layers: Sequence[str]) -> None:
    """Size of a model of which every process has all; its variables are made for it."""
    from ktrainer.steps.local_layers import check_local_layers, local_variables, set_local_layers

    if not model.built:
        print(f"model     {model.name}: built by its first batch, so its size is not known")
        return
    size = sum(map(_bytes, model.variables))
    print(
        f"model     {model.name}: {model.count_params():,} parameters, {bytes_text(size)}; with "
        f"gradients and optimizer {bytes_text(_state(model))} a process"
    )
    set_local_layers(model, local_layers)
    check_local_layers(model)
    local = local_variables(model)
    own = sum(math.prod(v.shape) for v in model.weights if id(v) in local)
    if local_layers:
        print(f"local     {own:,} of its parameters are each process's own")


def _show_sent(model: Any, backend: DataParallelConfig, size: int) -> None:
    """Print what each process sends of gradients; of embeddings that depends on the batch."""
    from ktrainer.steps.local_layers import local_variables
    from ktrainer.steps.sent_bytes import dense_variables, sent_bytes

    local = local_variables(model)
    summed = [v for v in model.trainable_variables if id(v) not in local]
    dense = dense_variables(model, summed, backend.sparse_as_dense)
    count = sent_bytes(dense, size, backend.wire, backend.low_rank)
    more = ", and the rows that it looked up in embeddings" if len(dense) < len(summed) else ""
    print(f"wire      each process sends {bytes_text(count)} of gradients an update{more}")


def _show_pipeline(
    model: Any, inputs: Any, share: int, config: Config, backend: PipelineConfig, plan: Plan
) -> None:
    """Stages, what crosses the cuts, the schedule, and what they come to."""
    from ktrainer.backends.pipeline.check_supported import (
        refuse_layers,
        refuse_model,
        refuse_penalty,
    )
    from ktrainer.backends.pipeline.partition.costs import state_factor
    from ktrainer.backends.pipeline.planning import plan_stages, trace_inference

    refuse_model(model, plan.replicas)
    refuse_penalty(model)
    refuse_layers(model)
    batch, factor = max(1, share // backend.microbatches), state_factor(model.optimizer)
    made = plan_stages(
        model,
        inputs,
        backend,
        microbatches=backend.microbatches * config.trainer.accumulate,
        batch=batch,
        state_factor=factor,
    )
    for graph in (made.graph, trace_inference(model, inputs, made.graph)):
        made.cut(graph)
    print(f"\nstages, for microbatches of {batch} examples; costs are {_UNITS[backend.costs]}")
    print(made.assignment)
    print()
    print(_memory(made, factor))
    schedule = _schedule(config, backend, share)
    _show_schedule(schedule, partial(stage_costs, made.assignment), backend, plan)


def equal_costs(stages: int, recompute: bool = False) -> Costs:
    """As `stage_costs`, of equal stages, and nothing for what crosses the cuts."""
    return Costs.of(
        stages, backward=3.0 if recompute else 2.0, input_grad=2.0 if recompute else 1.0
    )


def stage_costs(assignment: StageAssignment, recompute: bool = False) -> Costs:
    """Costs of these stages for a simulation: a third of the cost forward, two thirds backward.

    Args:
        recompute: backward passes begin with a forward pass.
    """
    costs = [stage.cost for stage in assignment.stages]
    sent = [(stage.time - stage.cost) / 2 for stage in assignment.stages[:-1]]
    share = 1.0 if recompute else 2 / 3
    return Costs.of(
        len(costs),
        forward=[cost / 3 for cost in costs],
        backward=[cost * share for cost in costs],
        # The gradient of the weights takes a third in any case.
        input_grad=[cost * (share - 1 / 3) for cost in costs],
        activation=sent,
    )


def _show_schedule(
    schedule: Schedule, costs: Callable[[bool], Costs], backend: PipelineConfig, plan: Plan
) -> None:
    """The grid with equal stages, and what the schedule comes to; the picture, if asked for.

    Args:
        costs: with recomputation or without.
    """
    timeline, speedup = _run(schedule, costs, backend)
    equal, even = _run(schedule, partial(equal_costs, schedule.stages), backend)
    print(f"\nschedule {schedule.name}, {schedule.microbatches} microbatches")
    print(grid_text(schedule))
    ideal = schedule.ranks * schedule.microbatches / (schedule.microbatches + schedule.ranks - 1)
    lines = [
        f"bubble    {100 * timeline.bubble:.1f}%, {100 * equal.bubble:.1f}% with equal stages",
        f"speed-up  {speedup:.2f} over one process, {even:.2f} with equal stages "
        f"(1f1b's ideal, P x M / (M + P - 1), is {ideal:.2f})",
    ]
    if plan.replicas > 1:
        lines.append(f"          {plan.replicas * speedup:.2f} with {plan.replicas} replicas")
    print("\n".join(["", *lines]))
    request = plan_request()
    if request is not None and request.picture is not None:
        draw(timeline, request.picture)
        print(f"picture   {request.picture}")
    if request is not None and request.trace is not None:
        print(f"trace     {add_plan(request.trace, timeline)}")


def _run(
    schedule: Schedule, costs: Callable[[bool], Costs], backend: PipelineConfig
) -> tuple[Timeline, float]:
    """The timeline, and the speed-up over one process without recomputation."""
    timeline = make_timeline(schedule, costs(backend.recompute))
    work = sum(make_timeline(schedule, costs(False)).busy)
    return timeline, work / timeline.makespan if timeline.makespan else 1.0


def _memory(made: StagePlan, factor: float) -> str:
    """Memory of each process: its stages' variables with all that belongs to them, activations.

    Args:
        factor: bytes in memory for each byte of a trained variable.
    """
    rows: list[Sequence[str]] = [("process", "stages", "parameters", "memory")]
    schedule = made.schedule
    for rank in range(schedule.ranks):
        mine = made.assignment.stages[rank :: schedule.ranks]
        again = _held_again(made, rank)
        state = sum(_bytes(v) * (factor if v.trainable else 1) for v in again)
        rows.append(
            (
                str(rank),
                ", ".join(str(stage.index) for stage in mine),
                f"{sum(stage.parameters for stage in mine) - sum(map(_size, again)):,}",
                bytes_text(sum(stage.memory for stage in mine) - round(state)),
            )
        )
    return table(rows)


def _held_again(made: StagePlan, rank: int) -> list[Any]:
    """The variables that several stages of a process share, once for each stage but the first."""
    names = made.graph.variable_names
    known = {names[id(v)]: v for node in made.graph.nodes for v in node.variables}
    found = []
    for name, stages in made.assignment.shared.items():
        here = [stage for stage in stages if made.schedule.rank_of(stage) == rank]
        found += [known[name]] * (len(here) - 1)
    return found


def _schedule(config: Config, backend: PipelineConfig, share: int) -> Schedule:
    """Of an update; a batch of fewer examples than microbatches is cut into as many."""
    microbatches = max(1, min(backend.microbatches, share)) * config.trainer.accumulate
    return make_schedule(
        backend.schedule,
        backend.partitions,
        microbatches,
        backend.chunks,
        backend.active_microbatches,
    )


def _with_batch_of(data: Any, context: RunContext) -> Plan:
    """The plan with the batch of data that brings its own."""
    from ktrainer.data.data_arguments import kind_of

    config, plan = context.config, context.plan
    kind, rows = kind_of(data), _rows(data)
    if kind in ("arrays", "random access"):
        return plan
    if rows is not None:
        own = replace(config, data=replace(config.data, batch_size=rows))
        return make_plan(own, pretend(own, Hardware.detect(context.world)))
    unknown = batch_notes(config, plan.rank_batches)
    notes = [note for note in plan.notes if note not in unknown]
    if isinstance(config.backend, PipelineConfig):
        notes.append(
            "the size of the data's batches is not known: stages and schedule are those of "
            f"data.batch_size={config.data.batch_size}."
        )
    batch = f"that of the {kind}; data.batch_size is for arrays"
    return replace(plan, batch=batch, notes=tuple(notes))


def _inputs(context: RunContext, data: Any) -> Any:
    """Specs of the model's inputs."""
    import keras

    from ktrainer.data import ShuffleOrder, make_feed
    from ktrainer.training.fit_settings import data_config

    feed = make_feed(
        data,
        world=context.world,
        config=replace(data_config(context.config), service=DataServiceConfig()),
        training=True,
        order=ShuffleOrder(),
        check=False,
    )
    try:
        return keras.utils.unpack_x_y_sample_weight(feed.spec)[0]
    finally:
        feed.close()


def _rows(data: Any) -> int | None:
    """Rows of a batch of a tf.data.Dataset that says so; None for all else."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        return None
    shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]
    return next((shape[0] for shape in shapes if shape.rank), None)


def _state(model: Any) -> int:
    from ktrainer.backends.pipeline.partition.costs import state_factor

    factor = state_factor(model.optimizer)
    trained = {id(v) for v in model.trainable_variables}
    sizes = ((_bytes(v), id(v) in trained) for v in model.variables)
    return round(sum(size * (factor if is_trained else 1) for size, is_trained in sizes))


def _bytes(variable: Any) -> int:
    import tensorflow as tf

    return _size(variable) * int(tf.as_dtype(variable.dtype).size)


def _size(variable: Any) -> int:
    return math.prod(variable.shape)
