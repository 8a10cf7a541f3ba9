"""Facts for the record of a run: its devices, its model, and how it has ended."""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ktrainer.data.rank_consistency import model_facts
from ktrainer.errors import Interrupted
from ktrainer.runtime.hardware import usable_cores

if TYPE_CHECKING:
    import keras


def device_facts() -> dict[str, int]:
    """The numbers of cores and GPUs that this process may use."""
    gpus = tf.config.list_logical_devices("GPU")
    return {"cores": len(usable_cores()), "gpus": len(gpus)}


def recorded_model_facts(model: keras.Model) -> dict[str, Any]:
    """Facts by which two models can be told apart: a digest of their layers, and all settings of
    the optimizer."""
    facts = model_facts(model)
    found: dict[str, Any] = {"class": facts["class"]}
    for kind in ("layer", "variable"):
        own = {name: value for name, value in facts.items() if name.startswith(f"{kind} ")}
        found[f"{kind}s"] = f"{len(own)}, {_digest(own)}"
    found["parameters"] = sum(math.prod(v.shape) for v in model.trainable_variables)
    for name, value in facts.items():
        if name.startswith("compile ") and name != "compile optimizer":
            found[name] = value
    if (optimizer := getattr(model, "optimizer", None)) is not None:
        found["optimizer"] = {"class": type(optimizer).__name__, **_settings(optimizer)}
    return found


def end_facts(error: BaseException | None, stop_reason: str | None = None) -> dict[str, Any]:
    """How a run has ended: `reason`, and more that says why.

    Args:
        error: what has ended it; None: nothing has.
        stop_reason: why a callback has ended training before its last epoch; None: none has.
    """
    if error is None:
        why = {"why": f"stopped because {stop_reason}"} if stop_reason else {}
        return {"reason": "finished", **why}
    if isinstance(error, Interrupted):
        return {"reason": "interrupted", "why": signal.Signals(error.signal).name}
    if isinstance(error, KeyboardInterrupt):
        return {"reason": "interrupted", "why": "SIGINT"}
    if isinstance(error, SystemExit):
        reason = "failed" if error.code else "interrupted"  # as the exit status says
        return {"reason": reason, "why": f"the script has called sys.exit({error.code!r})"}
    if isinstance(error, GeneratorExit):
        return {"reason": "interrupted", "why": "the loop over trainer.steps was left"}
    try:
        first = str(error).strip().partition("\n")[0]
    except Exception:  # a user's class whose text fails; the error itself must come through
        first = ""
    return {"reason": "failed", "why": f"{type(error).__name__}: {first}".rstrip(": ")}


def _settings(optimizer: Any) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = optimizer.get_config()
    except Exception:  # a user's class need not be serialisable to be trained with
        return {}
    # Its name depends on what was made before.
    return {key: value for key, value in config.items() if key != "name"}


def _digest(values: Any) -> str:
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=6).hexdigest()
