"""The plan of a run: its processes, devices and batches, or the reason why it cannot run.

Pure: a configuration and facts about the machine give a plan that can be printed, or a
`ConfigError`, before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktrainer.config import Config, DataParallelConfig, PipelineConfig, TfDistributeConfig
from ktrainer.config.pipeline_checks import effective_pipeline
from ktrainer.errors import ConfigError
from ktrainer.plan.strategy_plan import StrategyPlan, plan_strategy
from ktrainer.runtime.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes, devices and batches of a run; `print(plan)` shows them as text.

    Attributes:
        backend: name of the backend.
        engine: reduces gradients: `"mpi"`, `"horovod"`, or None if they are not reduced.
        size: processes in all.
        threads: threads of each process.
        device: `"gpu"` or `"cpu"`.
        rank_batches: examples of a full batch that each replica trains on, by replica; for arrays.
            A replica is one rank, but for a pipeline, whose replicas are `partitions` ranks each.
        global_batch: examples of one update, over `accumulate` batches; for arrays.
        batch: the batch in words, where the data brings its own of unknown size.
        notes: settings that are allowed, but may be unintended.
        partitions: processes that hold one copy of the model together.
        layout: the pipeline in words, if there is one.
        strategy: the layout of a tf.distribute strategy, if there is one.
    """

    backend: str
    engine: str | None
    size: int
    threads: int
    device: str
    rank_batches: tuple[int, ...]
    global_batch: int
    notes: tuple[str, ...] = ()
    partitions: int = 1
    layout: str | None = None
    strategy: StrategyPlan | None = None
    batch: str | None = None

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which trains on its own rows of the data."""
        return self.size // self.partitions

    def __str__(self) -> str:
        processes = "1 process" if self.size == 1 else f"{self.size} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        least, most = min(self.rank_batches), max(self.rank_batches)
        per_rank = str(most) if least == most else f"{least} to {most}"
        per_rank += f" a {'replica' if self.layout else 'rank'} and step"
        lines = [
            f"backend   {self.backend}" + (f", engine {self.engine}" if self.engine else ""),
            f"processes {processes} on {self.device}, {threads} each",
            f"batch     {self.batch or f'{self.global_batch} examples an update, {per_rank}'}",
        ]
        if self.layout:
            lines.insert(1, f"pipeline  {self.layout}")
        if self.strategy:
            lines.insert(1, f"strategy  {self.strategy}")
        return "\n".join(lines + [f"note      {note}" for note in self.notes])


def make_plan(config: Config, facts: Hardware) -> Plan:
    """The plan for a configuration on a machine.

    Raises:
        ConfigError: it cannot run; names what to change.
    """
    _check_backend(config, facts)
    _check_least_size(config)
    pipeline = config.backend if isinstance(config.backend, PipelineConfig) else None
    partitions = pipeline.partitions if pipeline else 1
    replicas, batch = facts.size // partitions, config.data.batch_size
    engine = _engine(config, facts, replicas)
    _check_engine(config, facts, engine)
    if config.data.batch == "per_worker":
        rank_batches = (batch,) * replicas
    else:
        base, extra = divmod(batch, replicas)
        rank_batches = tuple(base + (rank < extra) for rank in range(replicas))
    notes = _notes(config, facts, replicas, engine) + batch_notes(config, rank_batches)
    return Plan(
        backend=config.backend.name,
        engine=engine,
        size=facts.size,
        threads=config.world.threads or facts.threads or _fair_threads(facts),
        device="gpu" if facts.gpus else "cpu",
        rank_batches=rank_batches,
        global_batch=sum(rank_batches) * config.trainer.accumulate,
        notes=(*notes, *_pipeline_notes(config)),
        partitions=partitions,
        layout=_layout(config, pipeline, replicas) if pipeline else None,
        strategy=_strategy(config, facts),
    )


def _check_backend(config: Config, facts: Hardware) -> None:
    name = config.backend.name
    if name == "local" and facts.size > 1:
        message = (
            f"local is one process, but {facts.size} were started: set backend=data_parallel, "
        )
        message += "or start one."
        raise ConfigError(message, path="backend", value=name)
    if isinstance(config.backend, PipelineConfig):
        _check_partitions(config.backend.partitions, facts.size)
        _check_copies(config, facts.size)


def _strategy(config: Config, facts: Hardware) -> StrategyPlan | None:
    if not isinstance(config.backend, TfDistributeConfig):
        return None
    each = facts.gpus if facts.size == 1 else facts.gpus // max(1, facts.local_size)
    return plan_strategy(config.backend, size=facts.size, gpus=each, workers=facts.workers)


def _check_partitions(partitions: int, size: int) -> None:
    """Refuse a number of processes that is not a multiple of the partitions."""
    if size % partitions == 0:
        return
    below, above = size - size % partitions, size - size % partitions + partitions
    starts = [f"`ktrainer run -n {n}`" for n in (below, above) if n]
    near = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - partitions))
    are = "1 process is" if size == 1 else f"{size} processes are"
    raise ConfigError(
        f"{are} no multiple of {partitions} partitions: start with "
        f"{' or '.join(starts)}, or set backend.partitions={near}.",
        path="backend.partitions",
        value=partitions,
    )


def _check_copies(config: Config, size: int) -> None:
    """Refuse healing without a second copy of every partition."""
    partitions = config.backend.partitions if isinstance(config.backend, PipelineConfig) else 1
    if config.world.heal and size == partitions:
        raise ConfigError(
            "no other process has a copy of any partition of this pipeline, so the state of a lost "
            f"one could not be saved: start {2 * size} processes for two replicas, or set "
            "world.heal=false and let `ktrainer run --max-restarts` restart it from its last "
            "checkpoint.",
            path="world.heal",
            value=True,
        )


def _layout(config: Config, backend: PipelineConfig, replicas: int) -> str:
    """The pipeline as text."""
    backend = effective_pipeline(config, backend)
    stages = f"{backend.partitions} partitions"
    if backend.chunks > 1:
        stages += f" of {backend.chunks} stages each"
    copies = "1 replica" if replicas == 1 else f"{replicas} replicas ({backend.placement})"
    microbatches = f"{backend.microbatches} microbatch{'es' if backend.microbatches > 1 else ''}"
    return f"{stages} x {copies}, {backend.schedule} with {microbatches}"


def _engine(config: Config, facts: Hardware, replicas: int) -> str | None:
    """The engine: the chosen one if it can run, or the choice of `auto`."""
    backend = config.backend
    if isinstance(backend, PipelineConfig):
        if replicas == 1:
            return None  # nothing to sum over
    elif not isinstance(backend, DataParallelConfig):
        return None
    if backend.engine == "auto" and facts.world == "horovod":
        return "horovod"  # `horovodrun` without MPI: nothing else connects these processes
    if config.world.heal:
        return "mpi"
    if backend.engine == "auto":
        return "horovod" if facts.gpus and facts.horovod_nccl and facts.gpu_each else "mpi"
    if backend.engine == "horovod" and not facts.horovod:
        raise ConfigError(
            "Horovod is not installed: run `ktrainer horovod build`, or set backend.engine=mpi.",
            path="backend.engine",
            value="horovod",
        )
    if backend.engine == "horovod" and facts.horovod_nccl and facts.gpus and not facts.gpu_each:
        raise ConfigError(
            f"{facts.local_size} processes share {facts.gpus} GPU(s) on this node, and NCCL needs "
            "one for each: start fewer, or set backend.engine=mpi.",
            path="backend.engine",
            value="horovod",
        )
    return backend.engine


def _check_least_size(config: Config) -> None:
    """Refuse a least number of ranks without healing, which a launcher's option may have set."""
    least = config.world.min_size
    if least > 1 and not config.world.heal:
        raise ConfigError(
            "needs world.heal=true (`ktrainer run --heal`): without it no run continues with fewer "
            "ranks. Set it, or leave this key out.",
            path="world.min_size",
            value=least,
        )


def _check_engine(config: Config, facts: Hardware, engine: str | None) -> None:
    """Refuse what Horovod lacks: it would be left out without a word."""
    backend = config.backend
    if engine != "horovod" or not isinstance(backend, PipelineConfig | DataParallelConfig):
        return
    bucket = backend.bucket_mb if isinstance(backend, DataParallelConfig) else None
    if bucket is not None and backend.engine == "horovod":
        raise ConfigError(
            "Horovod makes its own buckets: set their size by HOROVOD_FUSION_THRESHOLD, in bytes, "
            "in the environment, or set backend.engine=mpi.",
            path="backend.bucket_mb",
            value=bucket,
        )
    if backend.hierarchical and backend.compression in ("fp16", "bf16"):
        raise ConfigError(
            "Horovod's own hierarchical all-reduce adds up 16 bits in 16 bits, so those are "
            "exchanged flat, and added up in float32: leave backend.hierarchical at null, or set "
            "backend.compression=none or backend.engine=mpi.",
            path="backend.hierarchical",
            value=True,
        )
    if backend.hierarchical and not (facts.horovod_nccl and facts.world == "mpi"):
        raise ConfigError(
            "Horovod sums hierarchically on GPUs only, where it has NCCL and MPI: leave "
            "backend.hierarchical at null, or set backend.engine=mpi, which does on CPUs too.",
            path="backend.hierarchical",
            value=True,
        )


def _fair_threads(facts: Hardware) -> int:
    return max(1, facts.cores // max(1, facts.local_size))


def _notes(config: Config, facts: Hardware, replicas: int, engine: str | None) -> list[str]:
    """Settings that can run, but are likely to surprise."""
    notes, data = [], config.data
    copies = "replicas" if config.backend.name == "pipeline" else "processes"
    if config.lr.scale != "none" and data.batch == "global" and replicas > 1:
        notes.append(
            f"lr.scale={config.lr.scale} with data.batch=global: the batch does not grow with "
            f"the number of {copies}, so results will depend on it."
        )
    if 0 < facts.gpus < facts.local_size:
        notes.append(f"{facts.local_size} processes share {facts.gpus} GPU(s) on this node.")
    if facts.cores < facts.local_size:
        notes.append(f"{facts.local_size} processes share {facts.cores} core(s) on this node.")
    if config.trainer.precision == "mixed_float16" and not facts.gpus:
        notes.append("mixed_float16 is slow on CPUs; mixed_bfloat16 or float32 is faster.")
    if isinstance(config.backend, DataParallelConfig) and config.backend.op == "sum":
        notes.append(f"backend.op=sum: gradients are {facts.size} times their average.")
    if isinstance(config.backend, DataParallelConfig) and config.backend.local_layers:
        notes.append(
            f"backend.local_layers={config.backend.local_layers}: each of {facts.size} processes "
            "trains its own, so results depend on their number."
        )
    if engine == "horovod" and getattr(config.backend, "bucket_mb", None) is not None:
        notes.append(
            "backend.bucket_mb has no effect with engine horovod, which makes its own buckets."
        )
    if engine == "mpi" and facts.gpus and facts.size > 1:
        notes.append(
            "gradients go through host memory; `ktrainer horovod build` gives Horovod with NCCL."
        )
    return notes


def batch_notes(config: Config, batches: tuple[int, ...]) -> list[str]:
    """Notes that follow from the size of the batch.

    Args:
        batches: `Plan.rank_batches`.
    """
    notes, backend = list[str](), config.backend
    copies = "replicas" if isinstance(backend, PipelineConfig) else "processes"
    if min(batches) == 0:
        notes.append(
            f"a batch of {sum(batches)} is less than {len(batches)} {copies}: "
            "some have no examples to train on."
        )
    if isinstance(backend, PipelineConfig) and min(batches) < backend.microbatches:
        notes.append(
            f"a replica's batch of {min(batches)} examples is less than "
            f"backend.microbatches={backend.microbatches}: it is cut into as many as it has."
        )
    return notes


def _pipeline_notes(config: Config) -> list[str]:
    """Settings that slow a pipeline down."""
    backend, notes = config.backend, list[str]()
    if not isinstance(backend, PipelineConfig):
        return notes
    if config.world.heal:
        notes.append(
            "world.heal=true: if processes are lost, the surviving replicas save the state, and "
            "all end; for that, weights and optimizer are in memory twice during each update."
        )
    if config.trainer.loss_scope == "global":
        instead = " in place of 1f1b" if backend.schedule == "1f1b" else ""
        notes.append(
            f"trainer.loss_scope=global: the schedule is gpipe{instead}, since the loss of the "
            "whole batch needs all forward passes first; activations of all microbatches are kept."
        )
    if backend.microbatches < backend.partitions:
        notes.append(
            f"backend.microbatches={backend.microbatches} is less than {backend.partitions} "
            f"partitions: most of the time they wait for one another; {4 * backend.partitions} "
            "is a good start."
        )
    return notes
