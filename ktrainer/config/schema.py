"""The schema: every key that a user can set, its type, default and meaning.

The `Attributes` sections below are the user's reference (`ktrainer config --describe`), so each
entry says what the key does, its unit and its range. Bounds and duration units are declared beside
the default and enforced by `ktrainer.config.value_checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

from omegaconf import MISSING

from ktrainer.config.backend_keys import BackendConfig, LocalConfig
from ktrainer.config.redact import redact
from ktrainer.config.schema_fields import duration, number

SCRIPT = "the script"


@dataclass(frozen=True)
class RunConfig:
    """The folder of the run's files.

    Attributes:
        dir: folder of the run, made with access for its owner alone when missing. null: rank 0
            makes a new folder runs/DATE_TIME. "{time}" in the name stands for date and time.
            Give a name to be able to resume the run later.
    """

    dir: str | None = None


@dataclass(frozen=True)
class ClipConfig:
    """Gradient clipping, after the gradients of all ranks are summed. At most one key.

    Attributes:
        global_norm: scale all gradients together so that their common norm is at most this.
        norm: scale each variable's gradient so that its own norm is at most this.
        value: limit each gradient element to [-value, value].
    """

    global_norm: float | None = number(None, above=0)
    norm: float | None = number(None, above=0)
    value: float | None = number(None, above=0)


@dataclass(frozen=True)
class InterruptConfig:
    """Response of `fit` to a signal to end.

    Attributes:
        signals: signals to handle, of SIGTERM, SIGINT, SIGHUP and SIGUSR1. After one on any rank,
            all ranks finish the same step, save a checkpoint if checkpointing is on, and exit: with
            code 75 if there is a checkpoint to resume from, else with 128 plus the signal's number.
            A second signal has its usual effect. []: none is handled.
        grace: seconds from the signal until the process is killed: 30 under Kubernetes
            (terminationGracePeriodSeconds), 30 under Slurm (KillWait) or as much as --signal
            leaves. A checkpoint that is unlikely to be complete by then is not started.
    """

    signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGINT"])
    grace: float = number(30.0, above=0)


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of some steps: what every rank does when, on one clock.

    Attributes:
        steps: updates to trace, such as "50-60" or "50", counted from 1. They are written to
            trace.json in the run folder, for Perfetto (ui.perfetto.dev) or chrome://tracing. null:
            none.
        tensorflow: with the operations that TensorFlow's profiler sees, which slow these steps.
    """

    steps: str | None = None
    tensorflow: bool = False

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last update of `steps`."""
        if self.steps is None:
            return None
        first, _, last = str(self.steps).partition("-")
        return int(first), int(last or first)


@dataclass(frozen=True)
class TrainerConfig:
    """Length of training, and how a step is computed.

    Attributes:
        epochs: passes over the data.
        max_steps: stop after this many updates in all. null: no limit.
        max_time: stop after this time in all, such as "2h", over all restarts. null: no limit.
        validate_every: how often to run on the validation data, such as "1ep", "500ba", "10m".
            null: never.
        limit_train_batches: train on this many batches an epoch (a whole number), or on this
            fraction of them (0.1). null: all.
        limit_val_batches: the same for validation; 0 turns validation off.
        fast_dev_run: try the whole program on this many batches of training and validation, in
            one epoch; true is 1, and 0 is off. It leaves no files: Keras' callbacks that write some
            do not run in `fit`; `evaluate` and `predict` run those that they are given.
        overfit_batches: train on the same first batches every epoch, to see whether the model can
            learn them. data.shuffle is off then; the batches of data sets and generators are kept
            in memory. A resume reads them again: the same ones if shuffles have a seed. 0 is off.
        accumulate: batches whose gradients are added up before one update. Equal to one batch
            this many times as large, with one all-reduce per update.
        clip: gradient clipping, after the gradients of all ranks are summed.
        precision: float32, mixed_bfloat16, or mixed_float16 (with loss scaling on which all
            ranks agree). null: the Keras dtype policy that is set already.
        xla: compile the computation of a step with XLA; communication stays outside.
        loss_scope: what a loss is computed on. local: each rank's, replica's or microbatch's own
            examples, which is exact for losses that are means or sums over examples. global: the
            outputs, targets and weights of the whole batch, gathered first, for losses that couple
            examples (contrastive losses, rankings).
        steps_per_call: updates in one compiled call, which is faster for small models. auto: in one
            process as many as lie between two moments at which something is due (a callback, a
            checkpoint, logs) and as about 50 ms take, with the same bits; else 1. A number:
            callbacks run once per call; in one process those that define `max_updates_per_call` get
            the events of each batch after it.
        deterministic: use only operations that give the same bits in every run. Needs a seed.
        interrupt: what `fit` does on a signal to end.
        profile: a trace of some steps.
    """

    epochs: int = number(1, at_least=1)
    max_steps: int | None = number(None, at_least=1)
    max_time: str | None = duration(None, units=("s",))
    validate_every: str | None = duration("1ep")
    limit_train_batches: int | float | None = number(None, above=0, fraction=True)
    limit_val_batches: int | float | None = number(None, at_least=0, fraction=True)
    fast_dev_run: int | bool = number(0, at_least=0)
    overfit_batches: int = number(0, at_least=0)
    accumulate: int = number(1, at_least=1)
    clip: ClipConfig = field(default_factory=ClipConfig)
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] | None = None
    xla: bool = False
    loss_scope: Literal["local", "global"] = "local"
    steps_per_call: int | Literal["auto"] = number("auto", at_least=1)
    deterministic: bool = False
    interrupt: InterruptConfig = field(default_factory=InterruptConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def asks_for_several_steps(self) -> bool:
        """Whether `steps_per_call` is a number above 1."""
        return self.steps_per_call not in (1, "auto")


@dataclass(frozen=True)
class DataServiceConfig:
    """Computing the training data of tf.data pipelines in other processes, by tf.data service.

    Attributes:
        config: file that `ktrainer data-service --config FILE` writes. null: this process computes
            its data itself.
        round_robin: true: batches come in the order of the pipeline, with the numbers of a run
            without the service; a dispatcher then has one worker. false: ranks take what is ready
            first, from any number of workers: each example once an epoch, in an order, and with
            batches, that differ from run to run.
        deadline: seconds to wait for the file, and for a dispatcher that does not answer.
    """

    config: str | None = None
    round_robin: bool = True
    deadline: float = number(60.0, above=0)


@dataclass(frozen=True)
class DataConfig:
    """How the data is cut into batches, and the batches over ranks.

    Attributes:
        batch: global: `batch_size` examples are one batch over all ranks, each rank trains on
            its slice, and the result does not depend on the number of processes. per_worker:
            every rank takes `batch_size` of its own, as under Horovod; see lr.scale.
        batch_size: examples in a batch, for arrays and examples by index. A tf.data.Dataset,
            PyDataset or generator brings its own batches.
        shuffle: shuffle arrays, examples by index, and the batches of a PyDataset. If you choose a
            seed (`seed`, or keras.utils.set_random_seed after the Trainer), the order is the one
            that Model.fit draws with it, the same in every epoch. Otherwise (the default) each
            epoch is shuffled differently, reproducibly. batch: for arrays and examples, shuffle
            within each batch. Other data keeps its own order.
        shard: how ranks share the data. batch: all read the same batches and take their slice.
            element, file: each rank reads only its own elements or files, for input pipelines
            too heavy to run in full on every rank; every n-th, from its own rank on.
        drop_remainder: for arrays and examples, drop the last batch of an epoch when it is smaller
            than the others, in training only.
        prefetch: batches prepared ahead of the step; 0 prepares each when it is needed. Where a
            process has one accelerator, the next two are also copied there while a step runs.
        service: computing the training data in other processes, by tf.data service.
    """

    batch: Literal["global", "per_worker"] = "global"
    batch_size: int = number(32, at_least=1)
    shuffle: bool | Literal["batch"] = True
    shard: Literal["batch", "element", "file"] = "batch"
    drop_remainder: bool = False
    prefetch: int = number(2, at_least=0)
    service: DataServiceConfig = field(default_factory=DataServiceConfig)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the whole state of training, and resuming from it.

    Attributes:
        dir: folder of the checkpoints. null: "checkpoints" in the run folder.
        every: how often to save, such as "1ep", "500ba", "10m". null: only as `best` says.
        keep: newest checkpoints to keep, at least 2, so that one damaged file does not end the
            run.
        asynchronous: write in the background: a step waits only until the state is copied to host
            memory, which takes room for one more copy of it. An error is raised at the next save,
            or at the end. false: a step waits until the checkpoint is on the disk.
        iterators: save the state of tf.data iterators inside an epoch, with the elements in their
            shuffle buffers; that of torch's generators for a DataLoader, and of Python's `random`
            for a PyDataset that it orders. false: a resumed run skips the batches that it has
            seen, which gives the same ones only if everything that draws is seeded.
        best: name of a logged value, such as "val_loss"; the checkpoint with its best value is
            kept too. null: none.
        mode: whether a lower (min) or a higher (max) value of `best` is better. auto: told by its
            name.
        resume: auto: resume from the newest good checkpoint, if there is one. never: start from
            scratch. Anything else: the path of the checkpoint to resume from.
    """

    dir: str | None = None
    every: str | None = duration(None)
    keep: int = number(2, at_least=2)
    asynchronous: bool = True
    iterators: bool = True
    best: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"
    resume: str = "auto"


@dataclass(frozen=True)
class LrPhase:
    """A phase of training with its own learning rate.

    Attributes:
        start: its start, such as "30ep" or "5000ba".
        multiplier: factor on the base learning rate while it lasts. Where phases overlap, their
            factors multiply.
        end: its end. null: never.
    """

    start: str = duration(MISSING, units=("ep", "ba"), positive=False)
    multiplier: float = number(MISSING, at_least=0)
    end: str | None = duration(None, units=("ep", "ba"))


@dataclass(frozen=True)
class LrConfig:
    """The learning rate over time, on top of the one that the optimizer was made with.

    Attributes:
        scale: factor by N, the number of processes, or in a pipeline that of its replicas: none: 1,
            linear: N, sqrt: its square root. Meant for data.batch=per_worker, where a larger N
            makes a larger batch.
        warmup: raise the learning rate from 1/N of it to all of it over this long, such as "5ep" or
            "1000ba" (Goyal et al., 2017), with any `scale`; without effect where N is 1. null: no
            warm-up.
        schedule: multipliers of the learning rate, as
            [{start: 30ep, multiplier: 0.1, end: 60ep}]; overlapping ones multiply. []: none. After
            a resume with another batch size, epochs stay epochs: 30ep is the end of the 30th.
        momentum_correction: when the learning rate changes, scale SGD's momentum with it.
    """

    scale: Literal["none", "linear", "sqrt"] = "none"
    warmup: str | None = duration(None, units=("ep", "ba"))
    schedule: list[LrPhase] = field(default_factory=list)
    momentum_correction: bool = True


@dataclass(frozen=True)
class LoggingConfig:
    """Progress display and log files.

    Attributes:
        every: how often metrics of all ranks are shown and logged inside an epoch, such as "50ba",
            "0.5ep", "10s". Those of the whole epoch always are, so "1ep" adds nothing.
        progress: rich: a live display. plain: lines. none: nothing. auto: rich on a terminal,
            else plain, as under mpirun.
        slow: share of the time from which on a wait for data, or a callback, is named as slow: once
            a fit, and again if it returns after a long while. Also named are ranks that compute
            longer than the others, or than before, for lack of processors or memory, and slow links
            between hosts. null: nothing is named.
        csv: write metrics.csv to the run folder.
        tensorboard: write TensorBoard events to the run folder.
        histograms: with `tensorboard`, how often to write histograms of all weights and of their
            gradients, such as "1000ba". null: never.
        wandb: send rows to Weights & Biases: the arguments of `wandb.init`, such as
            {project: digits, mode: offline}. null: off. Needs the extra `wandb`.
        mlflow: send rows to MLflow: {experiment: digits, tracking_uri: sqlite:///mlflow.db or a
            server, run_name: ..., tags: {...}}. null: off. Needs the extra `mlflow`.
        trackio: send rows to Trackio: the arguments of `trackio.init`, such as {project: digits}.
            null: off. Needs the extra `trackio`.
        batch_logs: logs of callbacks at the end of a batch. rank: those of the rank itself, at no
            cost. all: the same logs on every rank, over all ranks, at the cost of two small
            all-reduces and of waiting after each batch.
        tensorflow: show TensorFlow's own start-up messages: those after the Trainer is made (import
            keras after that), or all with `ktrainer run`.
    """

    every: str = duration("50ba")
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    slow: float | None = number(0.1, above=0)
    csv: bool = True
    tensorboard: bool = False
    histograms: str | None = duration(None, units=("ba",))
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    trackio: dict[str, Any] | None = None
    batch_logs: Literal["rank", "all"] = "rank"
    tensorflow: bool = False


@dataclass(frozen=True)
class WatchConfig:
    """More values in the rows of logs, the same on all ranks.

    Attributes:
        norms: how often to log the norms of weights and of gradients, as summed over ranks and
            before clipping, and the update's norm over that of the weights, such as "100ba"; a row
            is logged at each of these updates. null: never.
        layers: with `norms`, the norms of each layer too.
        learning_rate: log the learning rate of the update.
        speed: log examples a second, everything since the row before included.
        tokens: tokens in an example, for tokens a second besides. null: none.
        utilization: log the share of the devices' speed, measured with a matrix product at the
            start, that the model's operations take.
        memory: log the memory of the process with the most, and its peak; of GPUs too.
        communication: log the bytes of gradients that each process sends in an update; for
            backend=data_parallel.
    """

    norms: str | None = duration(None, units=("ba",))
    layers: bool = False
    learning_rate: bool = False
    speed: bool = False
    tokens: int | None = number(None, at_least=1)
    utilization: bool = False
    memory: bool = False
    communication: bool = False


@dataclass(frozen=True)
class HealthConfig:
    """Checks that training is sound.

    Attributes:
        nan: action of all ranks when the loss of any rank is not finite, at that step and before a
            checkpoint. stop: end training. skip: skip the update (also when a gradient is not
            finite). rollback: restore the last checkpoint and continue with the next batch.
            ignore: none, and checkpoints are saved nevertheless.
        spike: a loss above this many times the median of the last `spike_window` losses is a
            spike, such as 3. null: none is. For losses above 0. None is among the first
            `spike_window` updates of a fit.
        on_spike: action on a spike: stop, skip or rollback, as for `nan`.
        spike_window: number of updates in the median. Fewer make `spike` act earlier.
        max_skips: stop after this many skipped updates in a row.
        max_rollbacks: rollbacks, after which the next one stops training.
        audit_every: how often to compare checksums of all weights between ranks, such as "1ep",
            "100ba". null: never.
        check_data: before step 1, compare the first batches of the ranks, to find an unseeded
            shuffle.
        verify: before step 1, compare the gradients of a few examples computed at once with those
            computed in parts, and warn where they differ. auto: when ranks, replicas, microbatches
            or accumulation split an update; gives up after about 5 seconds. off: never. `ktrainer
            verify` is the full check.
    """

    nan: Literal["stop", "skip", "rollback", "ignore"] = "stop"
    spike: float | None = number(None, above=1)
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    spike_window: int = number(50, at_least=2)
    max_skips: int = number(10, at_least=1)
    max_rollbacks: int = number(3, at_least=1)
    audit_every: str | None = duration("1ep")
    check_data: bool = True
    verify: Literal["auto", "off"] = "auto"


@dataclass(frozen=True)
class WorldConfig:
    """The group of processes.

    Attributes:
        deadline: seconds that any wait for another rank may last before it ends with an error.
        start_deadline: the same for the start-up barrier in `Trainer(...)`: what a script does
            before it, such as preparing data, may take this long.
        threads: threads of each process. null: TF_NUM_INTRAOP_THREADS (`ktrainer run` sets it),
            else the machine's cores divided by its processes.
        heal: with engine mpi: when ranks fail, continue with the surviving ranks (data_parallel),
            or save the state that their replicas hold and exit (pipeline). Start the processes with
            `ktrainer run --heal`, or `mpirun --with-ft ulfm`.
        replace: start a new process for each that failed; it joins the others when it is ready.
        min_size: fewest ranks to continue with; with fewer, the surviving ranks save a checkpoint
            and exit.
        max_size: most ranks; processes that join may grow the run to this many. null: do not
            grow.
    """

    deadline: float = number(300.0, above=0)
    start_deadline: float = number(1800.0, above=0)
    threads: int | None = number(None, at_least=1)
    heal: bool = False
    replace: bool = False
    min_size: int = number(1, at_least=1)
    max_size: int | None = number(None, at_least=1)


@dataclass(frozen=True, repr=False)
class Config:
    """The whole configuration of a run.

    Attributes:
        seed: seeds Python, NumPy, Keras and the order of the data. null: unseeded.
        run: where the run keeps its files.
        trainer: length of training, and how a step is computed.
        data: how the data is cut into batches, and the batches over ranks.
        backend: how a step runs: local, data_parallel, pipeline or tf_distribute.
        checkpoint: saving the whole state of training, and resuming from it.
        lr: the learning rate over time.
        logging: progress display and log files.
        watch: more values in the rows of logs.
        health: checks that training is sound.
        world: the group of processes.
        callbacks: your own callbacks, as NAME: {type: REGISTERED_NAME, argument: value, ...}.
            NAME is yours to choose; NAME: null removes one. Registered are Keras'
            backup_and_restore, csv_logger, early_stopping, model_checkpoint, reduce_lr_on_plateau,
            remote_monitor, swap_ema_weights, tensorboard and terminate_on_nan; ktrainer's audit,
            average_metrics, broadcast_variables, checkpoint, csv_log, learning_rate, loss_guard,
            plain_progress, rich_progress, tensorboard_log and throughput; and those of
            @ktrainer.register(NAME).
        allow: prefixes of import paths that a callback's `type` may name, such as
            ["my_package.callbacks"]. Any other `type` is never imported.
        user: parameters of the script's own, `trainer.config.user.NAME`. Only those that the script
            names in its defaults, `Trainer.from_cli(defaults={"user": {"lr": 0.001}})`.
    """

    seed: int | None = number(0, at_least=0, at_most=2**32 - 1)
    run: RunConfig = field(default_factory=RunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=LocalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lr: LrConfig = field(default_factory=LrConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    allow: list[str] = field(default_factory=list)
    user: dict[str, Any] = field(default_factory=dict)

    # Values that came from secret environment variables; set by load_config, never printed.
    _secrets: ClassVar[tuple[str, ...]] = ()
    # Where keys were set; set by load_config. Keys set by the script may be changed by its calls.
    _origins: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def origin(self, key: str) -> str | None:
        """The file that set a dotted key, or "command line"; None if neither did."""
        origin = self._origins.get(key)
        return None if origin == SCRIPT else origin

    def is_set(self, key: str) -> bool:
        """Whether the script, a file or the command line has set a dotted key."""
        value = attrgetter(key)
        return key in self._origins or value(self) != value(Config())

    def with_changes(self, **changes: Any) -> Config:
        """`dataclasses.replace` that keeps the record of secrets and origins."""
        changed = replace(self, **changes)
        object.__setattr__(changed, "_secrets", self._secrets)
        object.__setattr__(changed, "_origins", self._origins)
        return changed

    def to_dict(self, redacted: bool = False) -> dict[str, Any]:
        """The configuration as nested plain dicts and lists.

        Args:
            redacted: replace secrets by `***`, for showing and saving.
        """
        values = asdict(self)
        return cast(dict[str, Any], redact(values, self._secrets)) if redacted else values

    def __repr__(self) -> str:
        return f"Config({self.to_dict(redacted=True)!r})"
