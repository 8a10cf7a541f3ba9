"""The recipe for building Horovod, as functions that build nothing.

Horovod 0.28.1 is the last release. For a current TensorFlow it needs two changes:

- One source, an XLA operation that ktrainer does not use, no longer compiles, because headers that
  it includes have moved. It is omitted.
- On GPUs Horovod calls a function of TensorFlow that is no longer exported. Another
  definition, through the public interface, is added.

Two more leave out what nothing uses, to build faster: debugging information, and a copy of Gloo for
the C++ standard of older TensorFlows.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktrainer.errors import SetupError

HOROVOD = "0.28.1"
BROKEN_SOURCE = "xla_mpi_ops.cc"
SOURCE_LIST = "horovod/tensorflow/CMakeLists.txt"
OPERATIONS = "horovod/tensorflow/mpi_ops.cc"
_AFTER_INCLUDES = "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n"
_STREAM_VALUE = """\
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""
PROJECT = "CMakeLists.txt"
_FLAGS = "CMAKE_CXX_FLAGS_RELWITHDEBINFO"
_LEFT_OUT = {
    f'string(REPLACE "-O2" "-O3" {_FLAGS} "${{{_FLAGS}}}")': f'set({_FLAGS} "-O3 -DNDEBUG")',
    # Still built where something links with it.
    "add_subdirectory(third_party/gloo)": "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
}
NEEDS = ("cffi", "cloudpickle", "packaging", "psutil", "yaml")  # what Horovod imports
# A wheel is installed in other environments than the one that built it: it looks for PyPI's MPI in
# the `lib` of its own, from site-packages/horovod/tensorflow. For the linker, through a shell.
_MPI_OF_ENVIRONMENT = "-Wl,-rpath,'$ORIGIN/../../../..'"
_MODULE_PACKAGES = {"yaml": "pyyaml"}
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)


@dataclass(frozen=True)
class Nccl:
    """Folders of CUDA and NCCL.

    Attributes:
        cuda: the CUDA toolkit's folder, with `bin/nvcc`.
        include, lib: folders with `nccl.h` and the library.
    """

    cuda: Path
    include: Path
    lib: Path


def wheel_key(python: str, tensorflow: str, mpi: str, nccl: bool, machine: str) -> str:
    """Name of the folder for a wheel: all that a built Horovod depends on.

    Args:
        python: as in wheel names, `"cp311"`.
        tensorflow, mpi: versions; of MPI with the vendor, `"openmpi-5.0.11"`.
        machine: processor architecture.
    """
    device = "nccl" if nccl else "cpu"
    return f"horovod-{HOROVOD}-{python}-tensorflow-{tensorflow}-{mpi}-{device}-{machine}"


def python_tag() -> str:
    """This interpreter's tag in the names of wheels."""
    return f"cp{sysconfig.get_config_var('py_version_nodot')}"


def without_broken_source(text: str) -> str:
    """Horovod's list of sources without the one that no longer compiles.

    Raises:
        SetupError: the list is not the expected one.
    """
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if BROKEN_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise SetupError(
            f"{SOURCE_LIST} of this Horovod names {BROKEN_SOURCE} on {len(lines) - len(kept)} "
            f"lines, not 1; the recipe is for Horovod {HOROVOD}"
        )
    return "".join(kept)


def with_stream_value(text: str) -> str:
    """Horovod's operations with a definition of the function that TensorFlow no longer exports.

    Raises:
        SetupError: the source is not the expected one.
    """
    if text.count(_AFTER_INCLUDES) != 1:
        raise SetupError(
            f"{OPERATIONS} of this Horovod is not that of {HOROVOD}, which the recipe is for"
        )
    first, _, last = _AFTER_INCLUDES.partition("\n")
    return text.replace(_AFTER_INCLUDES, f"{first}\n{_STREAM_VALUE}{last}")


def without_unused_parts(text: str) -> str:
    """Horovod's project without debugging information, and without the Gloo of older TensorFlows.

    Raises:
        SetupError: the project is not the expected one.
    """
    for line, instead in _LEFT_OUT.items():
        if text.count(line) != 1:
            raise SetupError(
                f"{PROJECT} of this Horovod has {line!r} {text.count(line)} times, not once; the "
                f"recipe is for Horovod {HOROVOD}"
            )
        text = text.replace(line, instead)
    return text


def adapt(source: Path) -> None:
    """Change an unpacked Horovod such that it builds for a current TensorFlow."""
    changes = (
        (SOURCE_LIST, without_broken_source),
        (OPERATIONS, with_stream_value),
        (PROJECT, without_unused_parts),
    )
    for name, change in changes:
        path = source / name
        path.write_text(change(path.read_text()))


def build_environment(
    given: Mapping[str, str], *, scripts: str, jobs: int, nccl: Nccl | None
) -> dict[str, str]:
    """The environment of the build.

    Args:
        given: the present environment.
        scripts: folder of the interpreter's commands, where pip puts mpicxx and cmake.
        jobs: how many compilers run at once.
        nccl: build for GPUs with these; None: for CPUs.
    """
    wanted = {
        "PATH": os.pathsep.join([scripts, given.get("PATH", os.defpath)]),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": f"-j{jobs}",
        # cmake 4 refuses the minimum versions that Horovod's third-party sources declare.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "LDFLAGS": " ".join([given.get("LDFLAGS", ""), _MPI_OF_ENVIRONMENT]).strip(),
    }
    if nccl is not None:
        wanted |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(nccl.cuda),
            "HOROVOD_NCCL_INCLUDE": str(nccl.include),
            "HOROVOD_NCCL_LIB": str(nccl.lib),
            "HOROVOD_NCCL_LINK": "SHARED",
            "LDFLAGS": f"{wanted['LDFLAGS']} -Wl,-rpath,{nccl.lib}",
        }
    return {**given, **wanted}


def find_nccl(
    environ: Mapping[str, str], site_packages: Sequence[Path], system: Path = Path("/usr")
) -> Nccl | None:
    """CUDA's compiler and NCCL, if both are here.

    Looks for CUDA in CUDA_HOME, on PATH and in `local/cuda` of `system`; for NCCL in NCCL_HOME,
    beside CUDA, in `system`, and in PyPI's `nvidia-nccl` package.
    """
    cuda = _find_cuda(environ, system / "local" / "cuda")
    if cuda is None:
        return None
    own = [Path(environ["NCCL_HOME"])] if environ.get("NCCL_HOME") else []
    wheels = [folder / "nvidia" / "nccl" for folder in site_packages]
    for home in [*own, cuda, system, system / "local", *wheels]:
        include = home / "include"
        for lib in (home / "lib", home / "lib64", *(home / "lib").glob("*-linux-gnu")):
            if (include / "nccl.h").exists() and any(lib.glob("libnccl.so*")):
                return Nccl(cuda, include, lib)
    return None


def _find_cuda(environ: Mapping[str, str], default: Path) -> Path | None:
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    # On PATH there may be only a script that calls the compiler: the headers tell.
    homes = [environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], default]
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    return next((Path(h) for h in homes if h and all((Path(h) / p).exists() for p in parts)), None)


def linkable(nccl: Nccl, folder: Path) -> Nccl:
    """`nccl` with a library that a linker finds.

    PyPI's package has only `libnccl.so.2`; linkers look for `libnccl.so`, so `folder` gets a link.
    """
    if (nccl.lib / "libnccl.so").exists():
        return nccl
    library = min(nccl.lib.glob("libnccl.so.*"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libnccl.so", library.name):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return Nccl(nccl.cuda, nccl.include, folder)


def packages_to_install(missing: Sequence[str]) -> list[str]:
    """Names on PyPI of modules that Horovod imports."""
    return [_MODULE_PACKAGES.get(module, module) for module in missing]


def progress(log: str) -> int | None:
    """The percentage that make printed last, or None."""
    found = _PERCENT.findall(log)
    return int(found[-1]) if found else None
