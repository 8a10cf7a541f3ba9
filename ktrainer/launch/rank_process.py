"""One rank: runs the user's script, and reports to the launcher.

Started by mpirun, or by `ktrainer.launch.parameter_server_cluster`, as
`python -m ktrainer.launch.rank_process FOLDER SCRIPT`. Imports only the standard library, so the
script finds an interpreter as fresh as `python SCRIPT` would give it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ktrainer.config.command_line import give_words, require_taken_words
from ktrainer.distributed import launcher_events
from ktrainer.launch.group_state import STACK_SIGNAL
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.launch.rank_channel import (
    ENVIRONMENT,
    ON_HOSTS,
    Note,
    Options,
    encode,
    fault_path,
    host_folder,
    open_pipe,
    pipe_path,
    read_options,
)
from ktrainer.script import bootstrap, plain_script

# Consequences of the loss of another rank; by name, so that nothing need be imported.
_FOLLOWS = frozenset(
    {
        "ktrainer.errors.DeadlineExceeded",
        "ktrainer.errors.PeerLost",
        "horovod.common.exceptions.HorovodInternalError",
        "mpi4py.MPI.Exception",
        "builtins.KeyboardInterrupt",
    }
)
# Failures that another try would repeat.
_FINAL = frozenset(
    {
        *(f"ktrainer.errors.{kind}Error" for kind in ("Config", "Setup", "Data", "Model")),
        "ktrainer.errors.CheckpointError",
        "builtins.ImportError",
        "builtins.SyntaxError",
        "builtins.SystemExit",
        "builtins.KeyboardInterrupt",
    }
)
_LOST = "ktrainer.errors.RanksLost"
_ASKED_TO_END = frozenset({"ktrainer.errors.Interrupted"})
_INTERRUPTED = 130
# `ktrainer.verify.verify_mode.VARIABLE`, written out as its import takes that of the configuration.
_VERIFY = "KTRAINER_VERIFY"
_FOLLOWER_WAITS = 1.0  # seconds

# (class, words of its message) -> the remedy, when there are several ranks.
_REMEDIES = {
    ("builtins.BlockingIOError", "unable to lock file"): "every rank writes this HDF5 file. Save "
    'with trainer.save("NAME.keras"), or on one rank: `if trainer.world.is_root:`, or a function '
    "under @ktrainer.rank_zero_only. A script without a Trainer under `ktrainer run` needs no "
    "change.",
    ("builtins.FileExistsError", "File exists"): "every rank makes this folder or file. Give "
    "os.makedirs(path, exist_ok=True), or make it in a function under @ktrainer.rank_zero_only.",
    ("builtins.FileNotFoundError", " -> "): "every rank runs this line, so another may have moved "
    "the file already. Move it on one rank, in a function under @ktrainer.rank_zero_only or after "
    "`if trainer.world.is_root:`, and call ktrainer.barrier() before another rank reads it.",
    ("builtins.EOFError", "EOF when reading a line"): "there is no terminal to read from. Give the "
    "script an argument.",
}


def main(argv: list[str]) -> None:
    """Redirect output, then run the script as `__main__`."""
    named, script = argv
    end_with_parent()
    folder = _folder_of(named)
    rank, local_rank = _rank_of(os.environ)
    options = read_options(folder)
    os.environ["KTRAINER_LAUNCHED"] = "1"
    if options.cpus:
        os.sched_setaffinity(0, options.cpus[local_rank % len(options.cpus)])
    _redirect(folder, rank, options)
    notes = open_pipe(pipe_path(folder, rank, "notes"))
    _send(notes, Note("started", pid=os.getpid()))
    launcher_events.listener = partial(_send_event, notes)
    _handle_faults(fault_path(folder, rank))
    # Registered first, so called last: after the exit handlers of the script.
    atexit.register(_send, notes, Note("ended", pid=os.getpid()))
    # Uncaught errors of this thread reach `_fail` below; other threads may call the hook.
    fail = partial(_fail, notes, options.ranks)
    sys.excepthook = lambda kind, error, trace: fail(error, 1)
    try:
        _run(script, rank, options, folder, partial(_report_import, notes))
    except SystemExit as error:
        asked = None if error.code in (None, 0) else _asked_to_end(error)
        if asked is not None:
            # Not a failure: mpirun would end ranks that are still on their way out.
            _send_interrupted(notes, asked)
            error.code = asked.code
        elif error.code not in (None, 0):
            fail(error, error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        fail(error, _exit_code(error))
    heals = json.loads(os.environ.get("KTRAINER_WORLD", "{}")).get("heal")
    if "KTRAINER_RANK" in os.environ or heals:
        _exit_now()


def _asked_to_end(error: BaseException | None) -> SystemExit | None:
    """The `Interrupted` that ends the script, maybe by another error: libraries of command lines
    catch a KeyboardInterrupt and exit."""
    while error is not None and not _is_one_of(type(error), _ASKED_TO_END):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, SystemExit) else None


def _send_interrupted(notes: int, error: SystemExit) -> None:
    code, text = int(str(error.code)), str(error)
    _send(notes, Note("interrupted", pid=os.getpid(), time=time.time(), code=code, text=text))


def _folder_of(name: str) -> Path:
    """The folder with this rank's pipes. That of a launch over several hosts holds the environment
    too, which is set."""
    if not name.startswith(ON_HOSTS):
        return Path(name)
    folder = host_folder(name.removeprefix(ON_HOSTS))
    os.environ.update(json.loads((folder / ENVIRONMENT).read_text()))
    return folder


def _handle_faults(path: Path) -> None:
    """Write stacks to a file when the process crashes, or when the launcher asks for them."""
    faults = path.open("w")  # stays open: the process may always crash
    faulthandler.enable(faults)
    # Until the world opens, which registers another file.
    faulthandler.register(STACK_SIGNAL, faults, all_threads=True)


def _rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """The number of this process's pipes, and its local rank."""
    if "KTRAINER_STABLE_RANK" in environ:  # it joins a running group
        return int(environ["KTRAINER_STABLE_RANK"]), int(environ["KTRAINER_LOCAL_RANK"])
    rank = int(environ.get("KTRAINER_RANK") or environ["OMPI_COMM_WORLD_RANK"])
    return rank, int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", rank))


def _exit_now() -> NoReturn:
    """Exit without shutting TensorFlow and MPI down: a coordinator would wait for ever for a worker
    that was restarted, and MPI for lost ranks."""
    atexit._run_exitfuncs()
    _flush_files()
    os._exit(0)


def _flush_files() -> None:
    """Write out what open files hold back, as the end of an interpreter does."""
    gc.unfreeze()
    files = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    opened = [each for each in gc.get_objects() if issubclass(type(each), files)]
    for each in (sys.stdout, sys.stderr, *opened):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            each.flush()


def _redirect(folder: Path, rank: int, options: Options) -> None:
    terminals = (options.terminal_out, options.terminal_err) if rank == 0 else (None, None)
    for number, pipe, terminal in zip((1, 2), ("out", "err"), terminals, strict=True):
        opened = None
        if terminal is not None:
            with contextlib.suppress(OSError):
                opened = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
        if opened is None:
            opened = open_pipe(pipe_path(folder, rank, pipe))
        os.dup2(opened, number)
        os.close(opened)
    # Lines appear when they are printed, although the interpreter sees a pipe.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(
    script: str, rank: int, options: Options, folder: Path, report: Callable[[list[str]], None]
) -> None:
    """Execute a file as `python script arguments...` does; a plain one through a Trainer.

    Args:
        report: is given, as TensorFlow is imported, the environment variables that the script has
            changed.
    """
    give_words(options.words)
    source, seed = Path(script).read_bytes(), options.seed
    verifies = _VERIFY in os.environ
    if verifies:
        from ktrainer.verify.verify_mode import SEED, seed_everything

        seed = SEED
    if plain_script.is_plain(source):
        marks = folder / "made" if options.ranks > 1 else None
        bootstrap.install(rank, seed, plain_script.imports_package(source, "horovod"), marks)
    else:
        bootstrap.watch(rank, options.ranks)
        if verifies:
            seed_everything()
    bootstrap.before_import(report)
    path = os.path.abspath(script)  # as Python has it; `sys.argv[0]` is as it was given
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [script, *options.arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    # Without the future statements of this file, which the script would inherit.
    code = compile(source, path, "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    require_taken_words()  # of a script that only evaluates or predicts


def _exit_code(error: BaseException) -> int:
    """The exit code of an uncaught error."""
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return int(vars(error)["exit_code"]) if _name(type(error)) == _LOST else 1


def _fail(notes: int, ranks: int, error: BaseException, code: int) -> NoReturn:
    """Report a failure, and exit without MPI_Finalize, which would wait for the other ranks."""
    note = Note(
        "failed",
        pid=os.getpid(),
        time=time.time(),
        code=code,
        kind=_name(type(error)),
        text=_format(error, ranks),
        follows=_is_consequence(error),
        final=_is_one_of(type(error), _FINAL),
    )
    _send(notes, note)
    if ranks == 1:  # with several they could wait for other ranks
        atexit.unregister(_send)
        atexit._run_exitfuncs()
    _flush_files()
    if note.follows and not isinstance(error, KeyboardInterrupt):
        # mpirun ends all ranks once one has exited; let the one at fault report first.
        time.sleep(_FOLLOWER_WAITS)
    os._exit(code)


def _send(notes: int, note: Note) -> None:
    # There may be no launcher to read it.
    with contextlib.suppress(OSError):
        data = encode(note)
        while data:
            data = data[os.write(notes, data) :]


def _report_import(notes: int, changed: list[str]) -> None:
    _send(notes, Note("imports", pid=os.getpid(), time=time.time(), text=", ".join(changed)))


def _send_event(notes: int, event: str, **fields: Any) -> None:
    """Send an event of `ktrainer.distributed.launcher_events`."""
    _send(notes, Note(event, pid=os.getpid(), time=time.time(), **fields))  # type: ignore[arg-type]


def _format(error: BaseException, ranks: int) -> str:
    if isinstance(error, SystemExit):
        return f"{error.code}\n" if isinstance(error.code, str) else ""
    text = "".join(traceback.format_exception(type(error), error, _users_frames(error)))
    return text + (_remedy(error) if ranks > 1 else "")


def _remedy(error: BaseException) -> str:
    """The remedy for an error that several ranks cause by doing the same."""
    for (kind, words), remedy in _REMEDIES.items():
        if _name(type(error)) == kind and words in str(error):
            return f"With several ranks: {remedy}\n"
    return ""


def _users_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the script on, without the frames of this file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a consequence of a lost peer."""
    while error is not None:
        if _is_one_of(type(error), _FOLLOWS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_one_of(kind: type, names: frozenset[str]) -> bool:
    return any(_name(base) in names for base in kind.__mro__)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


if __name__ == "__main__":
    main(sys.argv[1:])
