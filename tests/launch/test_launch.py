"""`ktrainer run` with real processes: output, failures, signals, ports."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ktrainer.cli.run_command import recorded_signals
from ktrainer.launch.process_tree import wait_until_ended
from tests.dist.harness.group import ROOT
from tests.launch.conftest import SECONDS, launch_command

Launch = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[[str], Path]
Within = Callable[..., None]

HEADER = """\
import os, signal, sys, time
from ktrainer import distributed as world
here = world.current_world()
here.barrier()
"""
LAST = "if here.rank == here.size - 1:\n    "
WAIT = "\ntime.sleep(60)\n"


@contextmanager
def running(*words: object, **env: str) -> Iterator[psutil.Popen]:
    """A launch that is still under way; ended when the block is."""
    process = psutil.Popen(
        launch_command(*words),
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        tree = [*process.children(recursive=True), process] if process.is_running() else []
        for one in tree:
            one.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that has left the tree holds it
            print(process.communicate(timeout=5)[0])  # for the report, should the test fail
        process.stdout.close()
        process.wait(10)


def test_output_is_merged_line_by_line_with_the_rank_in_front(
    launch: Launch, script: Script
) -> None:
    path = script(
        HEADER + "print('out', here.rank, 'of', here.size, sys.argv[1:])\n"
        "print('err', here.rank, file=sys.stderr)\nprint('no newline', end='')\n"
    )
    done = launch("-n", 3, path, "trainer.epochs=2", "own")
    assert done.returncode == 0, done.stderr
    arguments = "['own']"  # key=value is ktrainer's
    expected = [f"[{r}] out {r} of 3 {arguments}" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(
        expected + [f"[{r}] no newline" for r in range(3)]
    )
    assert sorted(done.stderr.splitlines()) == [f"[{r}] err {r}" for r in range(3)]


@pytest.mark.exhaustive
def test_lines_of_one_process_have_no_prefix_unless_asked(launch: Launch, script: Script) -> None:
    path = script("print('plain')")
    assert launch("-n", 1, path).stdout == "plain\n"
    assert launch("-n", 1, "--prefix", path).stdout == "[0] plain\n"


def test_script_runs_as_under_python(launch: Launch, script: Script, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    path = script(
        "import beside, pickle, sys\nclass Own: pass\n"
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own\n"
        "if __name__ == '__main__': print(beside.NAME, __file__ == sys.argv[0])"
    )
    assert launch("-n", 1, path).stdout == "found True\n"


def test_more_ranks_than_cores(launch: Launch, script: Script) -> None:
    ranks = (os.cpu_count() or 1) + 1
    path = script(
        HEADER + "for _ in range(200): total = here.oob_allreduce(1.0, 'sum')\n"
        "if here.is_root: print(total, len(os.sched_getaffinity(0)))"
    )
    done = launch("-n", ranks, "--no-prefix", path)
    assert done.stdout.split() == [str(float(ranks)), str(len(os.sched_getaffinity(0)))]


def test_threads_and_cores_are_shared_out(launch: Launch, script: Script) -> None:
    path = script(
        "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['TF_NUM_INTRAOP_THREADS'],"
        "len(os.sched_getaffinity(0)))"
    )
    cores = len(os.sched_getaffinity(0))
    bare = {"OMP_NUM_THREADS": "", "TF_NUM_INTRAOP_THREADS": ""}
    env = [f"-u{name}" for name in bare]
    done = subprocess.run(
        ["env", *env, *launch_command("-n", 1, path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.split() == [str(cores)] * 3
    assert launch("-n", 1, path, OMP_NUM_THREADS="7").stdout.split()[0] == "7"
    inherited = ["OMP_NUM_THREADS=7", "TF_NUM_INTRAOP_THREADS=8"]  # which the option replaces
    done = subprocess.run(
        ["env", *inherited, *launch_command("-n", 1, "--threads", 1, "--no-bind", path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.split() == ["1", "1", str(cores)]


def test_failing_rank_ends_all_and_its_traceback_is_last(launch: Launch, script: Script) -> None:
    path = script(
        HEADER + "def broken():\n    raise ValueError('rank 2 has had enough')\n"
        "if here.rank == 2:\n    broken()\nhere.barrier()\n"
    )
    done = launch("-n", 3, path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: rank 2 has had enough"
    start = lines.index("Traceback (most recent call last):")
    assert lines[start - 1] == ("ktrainer run: rank 2 raised ValueError; all others were ended:")
    assert lines[start + 1] == f'  File "{path}", line 8, in <module>'
    assert "prterun" not in done.stderr + done.stdout


def test_ranks_that_only_lost_a_peer_come_before(launch: Launch, script: Script) -> None:
    # Rank 0 writes out its files once it has told of its failure.
    path = script(
        "import time\nfrom pathlib import Path\nfrom ktrainer import distributed as world\n"
        "from ktrainer.errors import PeerLost\n"
        "here = world.current_world()\nhere.barrier()\n"
        "path = Path(__file__).with_name('told')\n"
        "if here.rank == 0:\n    file = path.open('w')\n    file.write('x')\n"
        "    raise PeerLost('rank 0 lost a peer')\n"
        "end = time.monotonic() + 30\n"
        "while not (path.exists() and path.stat().st_size) and time.monotonic() < end:\n"
        "    time.sleep(0.01)\nraise RuntimeError('the cause')\n"
    )
    done = launch("-n", 2, path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "RuntimeError: the cause"
    before = "ktrainer run: rank 0 then failed too: ktrainer.errors.PeerLost: rank 0 lost a peer"
    assert lines[0] == before


@pytest.mark.quick("os.kill(os.getpid(), signal.SIGKILL)-137-signal 9 (SIGKILL: Killed)")
@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL: Killed)"),
        ("import ctypes; ctypes.string_at(0)", 139, "signal 11 (SIGSEGV: Segmentation fault)"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(4)", 4, "exit code 4"),
    ],
)
def test_rank_that_ends_without_a_traceback_is_named(
    launch: Launch, script: Script, statement: str, code: int, said: str
) -> None:
    folder = "print(os.environ['OMPI_MCA_btl_sm_backing_directory'])\n"
    done = launch("-n", 2, "--no-prefix", script(HEADER + folder + LAST + statement + WAIT))
    assert done.returncode == code, done.stderr
    assert "rank 1" in done.stderr
    assert said in done.stderr
    if code == 139:
        assert 'script.py", line 7 in <module>' in done.stderr
    assert not Path(done.stdout.split()[0]).exists()


@pytest.mark.exhaustive
def test_config_mistake_is_found_before_a_process_starts(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    mark = tmp_path / "started"
    path = script(f"open({str(mark)!r}, 'w')")
    for words, said in [
        (["trainer.epoch=3"], "trainer.epochs"),
        (["backend.microbatch=3"], "Did you mean 'backend.microbatches' of backend=pipeline?"),
        (["backend=local"], "data_parallel"),
        (["--config", str(tmp_path / "absent.yaml")], "absent.yaml"),
    ]:
        done = launch("-n", 2, path, *words)
        assert done.returncode == 2, words
        assert said in done.stderr
    for options, said in [
        (["-n", "2", "--heal", "--min-n", "3"], "start at least 3"),
        (["--hosts", "one:1,two:1", "--network", "any"], "--network is for one host"),
    ]:
        done = launch(*options, path)
        assert done.returncode == 2, options
        assert said in done.stderr
    assert not mark.exists()
    assert launch("-n", 1, "--no-check", path, "trainer.epoch=3").returncode == 0
    # A script with a Trainer may choose the backend in its code, and then checks this itself.
    path = script("from ktrainer import Trainer")
    words = ("backend.microbatches=4", "backend.stages.0=embed")
    assert launch("-n", 2, path, *words, warm=True).returncode == 0


def test_absent_script_is_named(launch: Launch) -> None:
    done = launch("-n", 2, "nowhere.py")
    assert done.returncode == 2
    assert "'nowhere.py'" in done.stderr


def ready(path: Path) -> list[int]:
    """Process ids that the ranks of a script wrote, or nothing while some are missing."""
    text = path.read_text() if path.exists() else ""
    pids = [int(word) for word in text.split()]
    return pids if len(pids) == 2 else []


@pytest.mark.quick("9--9")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_signal_to_the_launcher_leaves_nothing(
    script: Script, tmp_path: Path, within: Within, number: int, code: int
) -> None:
    marks = tmp_path / "pids"
    path = script(
        HEADER + "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"with open({str(marks)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n" + WAIT
    )
    # A launcher that is killed cannot remove its folders.
    env = {"TMPDIR": str(tmp_path), "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    with running("-n", 2, path, **env) as launcher:
        within(30, lambda: ready(marks), "ranks to be ready")
        tree = launcher.children(recursive=True)
        assert len(tree) >= 5
        launcher.send_signal(number)
        assert launcher.wait(20) == code
        if number == signal.SIGKILL:
            # No process is then responsible for ending them.
            for child in tree:
                if child.pid not in ready(marks) and "prterun" not in child.name():
                    child.kill()
        assert wait_until_ended(tree, 5) == []


def test_ranks_may_end_in_their_own_way_after_sigterm(
    script: Script, tmp_path: Path, within: Within
) -> None:
    marks = tmp_path / "pids"
    path = script(
        HEADER + "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(75)))\n"
        f"with open({str(marks)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n" + WAIT
    )
    with running("-n", 2, path) as launcher:
        within(30, lambda: ready(marks), "ranks to be ready")
        launcher.send_signal(signal.SIGTERM)
        output = launcher.stdout.read()
        assert launcher.wait(20) == 75, output
        assert "saved" in output


def test_signals_that_are_ignored_stay_so() -> None:
    """As SIGHUP is under nohup, whose command is to outlive the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recorded_signals() as found:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert found == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_after_a_signal_is_shown(script: Script, tmp_path: Path, within: Within) -> None:
    marks = tmp_path / "pids"
    path = script(
        HEADER + "def save(*_): raise OSError('the disk is full')\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"with open({str(marks)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n" + WAIT
    )
    with running("-n", 2, path) as launcher:
        within(30, lambda: ready(marks), "ranks to be ready")
        launcher.send_signal(signal.SIGTERM)
        output = launcher.stdout.read()
        assert launcher.wait(20) == 143, output
    assert "ktrainer run: ended by SIGTERM" in output
    assert output.splitlines()[-1] == "OSError: the disk is full"


def test_timeout_ends_the_group(launch: Launch, script: Script) -> None:
    done = launch("-n", 2, "--timeout", 3, script("import time; time.sleep(60)"))
    assert done.returncode == 124
    assert "3 seconds" in done.stderr


def test_listens_on_loopback_alone(script: Script, tmp_path: Path, within: Within) -> None:
    marks = tmp_path / "pids"
    path = script(
        HEADER + f"with open({str(marks)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n" + WAIT
    )
    with running("-n", 2, path) as launcher:
        within(30, lambda: ready(marks), "ranks to be ready")
        listening = [
            f"{process.name()} {c.laddr.ip}:{c.laddr.port}"
            for process in launcher.children(recursive=True)
            for c in process.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
    assert listening
    assert all(re.search(r" (127\.0\.0\.1|::1):", line) for line in listening), listening


def test_rank_0_writes_to_the_terminal_itself(script: Script) -> None:
    path = script(
        HEADER + "print(f'rank {here.rank} {sys.stdout.isatty()} {sys.stderr.isatty()}')\n"
        "here.barrier()\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        launch_command("-n", 2, path), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # the other side was closed
        pass
    os.close(ours)
    assert process.wait(SECONDS) == 0
    lines = output.decode().replace("\x1b[2K", "").replace("\r", "\n").split("\n")
    assert sorted(line for line in lines if line) == ["[1] rank 1 False False", "rank 0 True True"]


def test_plain_mpirun_finds_ranks_too(script: Script) -> None:
    from ktrainer.launch.mpirun_command import find_mpirun, mpirun_command

    path = script(HEADER + "print(here.rank, here.size)")
    done = subprocess.run(
        mpirun_command(2, [sys.executable, str(path)], mpirun=find_mpirun(), root=True),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert sorted(done.stdout.split("\n")) == ["", "0 2", "1 2"], done.stderr
