"""`ktrainer horovod build`: build Horovod for the installed TensorFlow, and keep the wheel."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from ktrainer.errors import SetupError
from ktrainer.launch import horovod_recipe as recipe
from ktrainer.launch import process_tree
from ktrainer.runtime.hardware import tensorflow_has_cuda
from ktrainer.runtime.tensorflow_setup import REMEDY

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
_REPORT = (
    "import json, horovod.tensorflow as hvd; print(json.dumps({'mpi': bool(hvd.mpi_built()), "
    "'gloo': bool(hvd.gloo_built()), 'nccl': bool(hvd.nccl_built())}))"
)
_LOG_TAIL = 40  # lines shown when a step fails
_BUILD_TOOLS = ("packaging", "setuptools", "wheel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer horovod build`."""
    parser.description = (
        f"Build Horovod {recipe.HOROVOD} for the installed TensorFlow and MPI, with NCCL where "
        "TensorFlow has CUDA, and nvcc and NCCL are found; and install it. The wheel is kept: the "
        "next time it is installed as it is. Takes a few minutes, g++ and make."
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        default=None,
        help="where wheels are kept (default: ktrainer/wheels in the user's cache folder)",
    )
    parser.add_argument("--force", action="store_true", help="build even if a wheel is there")
    parser.add_argument("--jobs", type=int, default=None, help="compilers at once (default: cores)")
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help="Horovod's source archive, if already here"
    )


def run(args: argparse.Namespace) -> int:
    """Build or find the wheel, install it, and print its features.

    Raises:
        SetupError: a tool is missing, or a step failed; with the end of its log.
    """
    nccl = None
    if tensorflow_has_cuda():
        nccl = recipe.find_nccl(os.environ, [Path(sysconfig.get_path("purelib"))])
        if nccl is None:
            print(
                "TensorFlow has CUDA, but nvcc and NCCL are not both here: building for CPUs (set "
                "CUDA_HOME and NCCL_HOME; NCCL is in `pip install nvidia-nccl-cu12`)"
            )
    key = recipe.wheel_key(
        recipe.python_tag(), _tensorflow(), _mpi(), nccl is not None, platform.machine()
    )
    folder = (args.wheels or default_wheels(os.environ)).resolve() / key
    wheel = next(iter(sorted(folder.glob("horovod-*.whl"))), None)
    if wheel is None or args.force:
        wheel = _build(folder, args, nccl)
    if not _is_installed(wheel) or args.force:
        _install(wheel)
    built = _verify(nccl is not None)
    with_what = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in built.items())
    print(f"Horovod {recipe.HOROVOD} for TensorFlow {_tensorflow()}: {with_what}")
    print(f"kept in {wheel}")
    return 0


def default_wheels(environ: Mapping[str, str]) -> Path:
    """The default folder of wheels, in the user's cache folder."""
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ktrainer" / "wheels"


def _tensorflow() -> str:
    for name in _TENSORFLOWS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise SetupError(f"Horovod is built for an installed TensorFlow. Install it: {REMEDY}")


def _mpi() -> str:
    import mpi4py

    mpi4py.rc.initialize = False  # only the name is wanted
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"{vendor.replace(' ', '').lower()}-{'.'.join(map(str, version))}"


def _build(folder: Path, args: argparse.Namespace, nccl: recipe.Nccl | None) -> Path:
    scripts = sysconfig.get_path("scripts")
    _check_tools(scripts)
    jobs = args.jobs or os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="ktrainer-horovod-") as name:
        work = Path(name)
        if nccl is not None:
            nccl = recipe.linkable(nccl, folder / "nccl")
        env = recipe.build_environment(os.environ, scripts=scripts, jobs=jobs, nccl=nccl)
        source = _unpack(args.sdist or _download(work, env), work / "source")
        recipe.adapt(source)
        pip = ["wheel", "--no-build-isolation", "--no-deps", "-v", "-w", str(work / "out")]
        _step("building Horovod", [*_pip(), *pip, str(source)], env, work / "build.log")
        built = next((work / "out").glob("horovod-*.whl"))
        return _keep(built, folder)


def _check_tools(scripts: str) -> None:
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    absent = [
        tool for tool in ("cmake", "make", "g++", "mpicxx") if not shutil.which(tool, path=path)
    ]
    modules = [module for module in (*_BUILD_TOOLS, "pip") if find_spec(module) is None]
    if absent or modules:
        raise SetupError(
            f"building Horovod needs {', '.join(absent + modules)}. Python's packages and cmake: "
            'in the checkout of ktrainer, `pip install ".[horovod]"`. Compilers, on Debian and '
            "Ubuntu: `apt-get install g++ make`"
        )


def _download(work: Path, env: Mapping[str, str]) -> Path:
    pip = ["download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation"]
    command = [*_pip(), *pip, "-d", str(work), f"horovod=={recipe.HOROVOD}"]
    _step("downloading Horovod's source", command, env, work / "download.log")
    return next(work.glob("horovod-*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    return next(path for path in folder.iterdir() if path.is_dir())


def _keep(built: Path, folder: Path) -> Path:
    """Move a wheel to the folder of wheels atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / built.name
    temporary = folder / f".{built.name}.{os.getpid()}"
    shutil.copyfile(built, temporary)
    os.replace(temporary, target)
    return target


def _is_installed(wheel: Path) -> bool:
    """Return whether the installed Horovod is this wheel; pip records the origin of a package."""
    try:
        recorded = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    if not recorded or json.loads(recorded).get("url") != wheel.as_uri():
        return False
    init = metadata.distribution("horovod").locate_file("horovod/__init__.py")
    return os.path.getmtime(str(init)) >= wheel.stat().st_mtime


def _install(wheel: Path) -> None:
    missing = [module for module in recipe.NEEDS if find_spec(module) is None]
    if missing:
        _pip_quietly("install", *recipe.packages_to_install(missing))
    _pip_quietly("install", "--force-reinstall", "--no-deps", str(wheel))


def _verify(nccl: bool) -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(
            "the built Horovod does not load. Build it again: `ktrainer horovod build --force`. It "
            f"said:\n{done.stderr.rstrip()}"
        )
    built: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    if not built["mpi"] or (nccl and not built["nccl"]):
        raise SetupError(f"the built Horovod lacks what it was built for: {built}")
    return built


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _pip_quietly(*words: str) -> None:
    done = subprocess.run([*_pip(), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"pip {words[0]} failed:\n{done.stdout}{done.stderr}".rstrip())


def _step(what: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    """Run a command into a log, and print its progress; raise with the end of the log."""
    began = time.monotonic()
    shown = -1
    print(f"{what} ...", flush=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=dict(env), stdout=stream, stderr=stream)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                percent = recipe.progress(log.read_text(errors="replace")) or 0
                if percent // 10 > shown // 10:
                    shown = percent
                    print(f"  {percent:3d}% after {time.monotonic() - began:.0f} s", flush=True)
        finally:
            if process.poll() is None:  # interrupted: pip's compilers would continue
                top = psutil.Process(process.pid)
                process_tree.send([*top.children(recursive=True), top], signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        kept = Path(tempfile.gettempdir()) / f"ktrainer-horovod-{os.getpid()}.log"
        shutil.copyfile(log, kept)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        raise SetupError(f"{what} failed; its log is {kept}, and ends with:\n{tail}")
