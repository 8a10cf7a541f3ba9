"""Names of other libraries that have no meaning here, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from ktrainer.errors import SetupError

_SESSIONS = (
    "{name} belongs to the sessions of TensorFlow 1, which TensorFlow 2.0 replaced in 2019; its "
    "estimators, whose hooks it was for, left with TensorFlow 2.16. Call "
    "broadcast_variables(model.variables, root_rank=0), and the same for optimizer.variables, once "
    "both are built; with model.fit use callbacks.BroadcastGlobalVariablesCallback(0)."
)
_TIMELINE = (
    "{name} belongs to Horovod's engine. Use TensorFlow's profiler, "
    "tf.profiler.experimental.start; with backend.engine=horovod of the Trainer, Horovod reads "
    "HOROVOD_TIMELINE itself."
)
_SPARK = (
    "{name} runs Horovod on a cluster of another framework. Start the script itself on all nodes: "
    "with `ktrainer run -n N script.py`, mpirun, or srun in a Slurm job."
)
_ESTIMATOR_NAMES = ("estimator", "Estimator", "EstimatorSpec", "RunConfig", "train_and_evaluate")
_ESTIMATORS_LEFT = (
    "{name} belongs to tf.estimator, which left TensorFlow with 2.16 in 2024. Build a Keras model "
)
_SESSION_NAMES = ("Session", "MonitoredSession", "MonitoredTrainingSession", "SessionRunHook")
_SESSIONS_LEFT = (
    "{name} belongs to the sessions of TensorFlow 1, which TensorFlow 2.0 replaced in 2019; it is "
    "left only under tf.compat.v1, for graphs without Keras 3. Write a loop with "
)


def of_tensorflow_1(loop: str, model: str) -> dict[str, str]:
    """Replacements for sessions, their hooks and estimators, by name.

    Args:
        loop: ends the sentence "Write a loop with ...".
        model: ends the sentence "Build a Keras model ...".
    """
    return {
        **dict.fromkeys(_SESSION_NAMES, _SESSIONS_LEFT + loop),
        **dict.fromkeys(_ESTIMATOR_NAMES, _ESTIMATORS_LEFT + model),
    }


INSTEAD = {
    "BroadcastGlobalVariablesHook": _SESSIONS,
    "broadcast_global_variables": _SESSIONS,
    "broadcast_object_fn": _SESSIONS,
    "run": _SPARK,
    "spark": _SPARK,
    "ray": _SPARK,
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "SyncBatchNormalization": (
        "{name} is not available in loops of your own. Use keras.layers.BatchNormalization("
        "synchronized=True) in a model that ktrainer's Trainer fits: its statistics are those of "
        "the batches of all ranks."
    ),
    "load_model": (
        "{name}: saved models are plain Keras models here. Call keras.models.load_model(path), "
        "then DistributedOptimizer(model.optimizer)."
    ),
    "BestModelCheckpoint": (
        "{name}: use keras.callbacks.ModelCheckpoint(save_best_only=True) on rank 0, after "
        "callbacks.MetricAverageCallback()."
    ),
    **of_tensorflow_1(
        "tf.function and DistributedGradientTape, and save it with checkpoints of Trainer.fit, "
        "which also resumes.",
        "and train it with model.fit, or with ktrainer's Trainer.fit, whose "
        "backend.name=data_parallel needs no hooks: checkpoint.*, callbacks and `ktrainer run` do "
        "what they did.",
    ),
    **dict.fromkeys(
        ("TensorFlowState", "TensorFlowKerasState", "KerasState"), "{name}: use elastic.{name}."
    ),
    "DistributedAdasumOptimizer": "{name}: use DistributedOptimizer(optimizer, op=Adasum).",
}


def refuse_name(module: str, name: str, instead: Mapping[str, str] = INSTEAD) -> NoReturn:
    """Raise for an attribute that a module does not have.

    Args:
        instead: by name, what to use instead of what other libraries have.

    Raises:
        SetupError: other libraries have it; says what to use. (Not an AttributeError, whose message
            `from module import name` would drop.)
        AttributeError: they do not, either.
    """
    if name in instead:
        raise SetupError(instead[name].format(name=name))
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
