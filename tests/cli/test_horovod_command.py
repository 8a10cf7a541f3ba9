"""What building Horovod takes; the build itself is how `make test` gets its Horovod."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktrainer.cli import horovod_command
from ktrainer.errors import SetupError
from ktrainer.launch import horovod_recipe
from tests.processes import ktrainer

LIST = """\
list(APPEND TF_SOURCES
     "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc"
     "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc"
     )
"""


def test_one_line_is_dropped_from_the_sources() -> None:
    kept = horovod_recipe.without_broken_source(LIST)
    assert kept.splitlines() == [x for i, x in enumerate(LIST.splitlines()) if i != 2]
    with pytest.raises(SetupError, match=r"0 lines, not 1"):
        horovod_recipe.without_broken_source(kept)


INCLUDES = """\
GpuStreamHandle AsGpuStreamValue(Stream* stream);
#else
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
"""


def test_missing_function_is_defined_after_the_headers_and_for_gpus_only() -> None:
    changed = horovod_recipe.with_stream_value(INCLUDES)
    body = changed.index("AsGpuStreamValue(Stream* stream) {")
    assert changed.index(">= 2011000000") < body < changed.index("// HAVE_GPU")
    with pytest.raises(SetupError, match="mpi_ops"):
        horovod_recipe.with_stream_value(changed)


PROJECT = """\
string(REPLACE "-O2" "-O3" CMAKE_C_FLAGS_RELWITHDEBINFO "${CMAKE_C_FLAGS_RELWITHDEBINFO}")
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
    add_subdirectory(third_party/gloo)
    add_subdirectory(third_party/compatible17_gloo)
"""


def test_debugging_information_and_an_unused_gloo_are_left_out() -> None:
    lines = horovod_recipe.without_unused_parts(PROJECT).splitlines()
    assert lines == [
        PROJECT.splitlines()[0],
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
        "    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
        PROJECT.splitlines()[3],
    ]
    with pytest.raises(SetupError, match=r"0 times, not once"):
        horovod_recipe.without_unused_parts("\n".join(lines))


def test_unpacked_source_is_adapted(tmp_path: Path) -> None:
    folder = tmp_path / "horovod" / "tensorflow"
    folder.mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(LIST)
    (folder / "mpi_ops.cc").write_text(INCLUDES)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    horovod_recipe.adapt(tmp_path)
    assert "xla_mpi_ops" not in (folder / "CMakeLists.txt").read_text()
    assert "platform_specific_handle" in (folder / "mpi_ops.cc").read_text()
    assert "EXCLUDE_FROM_ALL" in (tmp_path / "CMakeLists.txt").read_text()


def test_key_tells_builds_apart() -> None:
    keys = {
        horovod_recipe.wheel_key(python, tf, mpi, nccl, machine)
        for python in ("cp311", "cp312")
        for tf in ("2.21.0", "2.21.1")
        for mpi in ("openmpi-5.0.10", "openmpi-5.0.11")
        for nccl in (True, False)
        for machine in ("x86_64", "aarch64")
    }
    assert len(keys) == 2**5
    assert not any(os.sep in key for key in keys)


def test_environment_of_the_build(tmp_path: Path) -> None:
    env = horovod_recipe.build_environment({"PATH": "/bin"}, scripts="/venv", jobs=3, nccl=None)
    assert env["PATH"] == "/venv:/bin"
    assert env["MAKEFLAGS"] == "-j3"
    assert env["HOROVOD_WITH_MPI"] == env["HOROVOD_WITH_GLOO"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    nccl = horovod_recipe.Nccl(tmp_path / "cuda", tmp_path / "include", tmp_path / "lib")
    env = horovod_recipe.build_environment({}, scripts="/venv", jobs=3, nccl=nccl)
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    mpi = "-Wl,-rpath,'$ORIGIN/../../../..'"
    assert env["LDFLAGS"] == f"{mpi} -Wl,-rpath,{tmp_path / 'lib'}"
    env = horovod_recipe.build_environment(
        {"LDFLAGS": "-L/opt"}, scripts="/venv", jobs=3, nccl=None
    )
    assert env["LDFLAGS"] == f"-L/opt {mpi}"


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def test_nccl_needs_the_compiler_the_header_and_the_library(tmp_path: Path) -> None:
    site, cuda = tmp_path / "site", tmp_path / "cuda"
    environ = {"CUDA_HOME": str(cuda), "PATH": ""}
    make(site / "nvidia/nccl/include/nccl.h")
    make(site / "nvidia/nccl/lib/libnccl.so.2")
    assert horovod_recipe.find_nccl(environ, [site], tmp_path) is None
    make(cuda / "bin/nvcc")
    assert horovod_recipe.find_nccl(environ, [site], tmp_path) is None
    make(cuda / "include/cuda_runtime.h")
    found = horovod_recipe.find_nccl(environ, [site], tmp_path)
    assert found is not None
    assert found.cuda == cuda
    assert found.lib == site / "nvidia/nccl/lib"
    on_path = horovod_recipe.find_nccl({"PATH": str(cuda / "bin")}, [site], tmp_path)
    assert on_path == found
    home = tmp_path / "nccl"
    make(home / "include/nccl.h")
    make(home / "lib/libnccl.so")
    chosen = horovod_recipe.find_nccl({**environ, "NCCL_HOME": str(home)}, [site], tmp_path)
    assert chosen is not None
    assert chosen.lib == home / "lib"


def test_linker_gets_the_name_that_it_looks_for(tmp_path: Path) -> None:
    library = make(tmp_path / "wheel" / "libnccl.so.2")
    nccl = horovod_recipe.Nccl(tmp_path, tmp_path, library.parent)
    linked = horovod_recipe.linkable(nccl, tmp_path / "links")
    assert (linked.lib / "libnccl.so").resolve() == library
    assert horovod_recipe.linkable(linked, tmp_path / "other") == linked
    assert horovod_recipe.linkable(nccl, tmp_path / "links") == linked


def test_progress_is_what_make_printed_last() -> None:
    assert horovod_recipe.progress("cmake\n") is None
    assert horovod_recipe.progress("[  3%] Building\n  [ 45%] Linking\nwarning: 99%\n") == 45


def test_wheels_are_kept_in_the_users_cache() -> None:
    assert horovod_command.default_wheels({"XDG_CACHE_HOME": "/c"}) == Path("/c/ktrainer/wheels")
    assert horovod_command.default_wheels({}) == Path.home() / ".cache/ktrainer/wheels"


def test_wheel_appears_whole(tmp_path: Path) -> None:
    built = tmp_path / "horovod-0.28.1-x.whl"
    built.write_bytes(b"wheel")
    kept = horovod_command._keep(built, tmp_path / "a" / "b")
    assert kept.read_bytes() == b"wheel"
    assert [p.name for p in kept.parent.iterdir()] == [built.name]


def test_missing_tools_are_named_with_what_to_install(tmp_path: Path) -> None:
    words = ["horovod", "build", "--wheels", tmp_path, "--sdist", "x"]
    done = ktrainer(*words, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "make" in done.stderr
    assert "apt-get install g++ make" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.horovod
def test_horovod_is_here_and_was_built_with_mpi() -> None:
    built = horovod_command._verify(nccl=False)
    assert built["mpi"]
    assert built["gloo"]


@pytest.mark.horovod
def test_horovod_finds_mpi_in_any_environment() -> None:
    from importlib import metadata

    library = next(
        path
        for path in metadata.files("horovod") or []
        if path.name.startswith("mpi_lib") and "tensorflow" in path.parts
    )
    assert b"$ORIGIN/../../../.." in Path(str(library.locate())).read_bytes()
