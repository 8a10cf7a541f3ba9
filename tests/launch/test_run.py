"""`ktrainer run`: whose words are whose, what is shown, and how scripts may end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.harness.group import ROOT
from tests.launch.conftest import SECONDS
from tests.processes import ktrainer, python

Script = Callable[[str], Path]
RANK = "import os, sys\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
# Ranks that end wait until rank 0 has printed: lines are written at once.
MEET = """
import pathlib, time
met = pathlib.Path(__file__).with_name("met")
if rank == 0: met.touch()
while not met.exists(): time.sleep(0.01)
"""


def run(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktrainer.cli.main", "run", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_words_of_ktrainer_and_of_the_script(script: Script) -> None:
    path = script(
        "import sys\nfrom ktrainer.config import command_line\n"
        "print(sys.argv[1:], command_line.launcher_words, __name__)"
    )
    words = ["--lr", "0.1", "seed=3", "--config=configs/local.yaml", "own"]
    done = run(path, *words, "--", "--out=x", "a=b", "--", "c")
    assert done.returncode == 0, done.stderr
    own = "['--lr', '0.1', 'own', '--out=x', 'a=b', '--', 'c']"
    assert done.stdout == f"{own} ['seed=3', '--config=configs/local.yaml'] __main__\n"
    untouched = run("--no-check", path, "seed=3", "a=b", "-n", 5).stdout
    assert untouched == "['seed=3', 'a=b', '-n', '5'] [] __main__\n"


def test_words_that_the_scripts_trainer_does_not_have_are_refused(script: Script) -> None:
    text = "from ktrainer import Trainer\nTrainer({'data': {'batch_size': 8}})\n"
    words = ("data.batch_size=8", "trainer.epochs=30")
    done = ktrainer("run", script(text + "raise SystemExit"), *words)
    assert done.returncode == 1
    assert "trainer.epochs has no effect: the script makes its Trainer without" in done.stderr
    text += "print(Trainer.from_cli().config.trainer.epochs)"
    done = ktrainer("run", script(text), "trainer.epochs=30")
    assert (done.returncode, done.stdout) == (0, "30\n"), done.stderr


def test_all_words_after_a_separator_are_the_scripts(script: Script) -> None:
    done = run(script("import sys; print(sys.argv[1:])"), "--", "a=b", "-n", 5)
    assert (done.returncode, done.stdout) == (0, "['a=b', '-n', '5']\n"), done.stderr


def test_a_separator_before_the_script_ends_the_options(script: Script) -> None:
    done = run("--", script("import sys; print(sys.argv[1:])"), "word")
    assert (done.returncode, done.stdout) == (0, "['word']\n"), done.stderr


def test_the_words_are_not_inherited_by_children(script: Script) -> None:
    path = script(
        "import subprocess, sys\n"
        "code = 'from ktrainer.config.command_line import launcher_words as w; print(w)'\n"
        "print(subprocess.check_output([sys.executable, '-c', code], text=True))"
    )
    assert run(path, "seed=3").stdout.strip() == "[]"


def test_an_unknown_key_may_be_a_word_of_the_script(script: Script) -> None:
    done = run(script("print(1)"), "lerning=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "lerning: unknown key" in done.stderr
    assert "go after --" in done.stderr


@pytest.mark.exhaustive
def test_other_ranks_are_kept_back(script: Script) -> None:
    """Unless all are asked for, as most tests of a launch do."""
    path = script(RANK + "print('here', rank)\nprint('aside', rank, file=sys.stderr)")
    done = run("-n", 3, path)
    assert done.stdout == "[0] here 0\n"
    assert len(done.stderr.splitlines()) == 3


def test_what_a_rank_printed_before_it_failed_is_shown(script: Script) -> None:
    path = script(
        RANK + "print('here', rank)\n" + MEET + "if rank == 2:\n"
        "    for line in range(30000): print('line', line)\n    raise OSError('x')\n"
        "time.sleep(30)"
    )
    done = run("-n", 3, path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "[0] here 0"
    assert lines[1:3] != ["[2] here 2", "[2] line 0"]  # the last lines only, in bounded memory
    assert lines[-1] == "[2] line 29999"
    assert 1000 < len(lines) < 20000
    assert not any(line.startswith("[1]") for line in lines)


def test_a_rank_that_is_killed_shows_what_it_printed(script: Script) -> None:
    path = script(
        RANK + "print('here', rank, flush=True)\n" + MEET + "import signal\n"
        "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(30)"
    )
    done = run("-n", 2, path)
    assert done.returncode == 137
    assert sorted(done.stdout.splitlines()) == ["[0] here 0", "[1] here 1"]


ENDS = {
    "exit": ("import sys; sys.exit(3)", 3, ""),
    "caught": ("import sys\ntry: sys.exit(3)\nexcept SystemExit: print('caught')", 0, "caught\n"),
    "children": (
        "import multiprocessing\n"
        "class Own:\n    def __init__(self, n): self.n = n\n"
        "def double(own): return Own(2 * own.n)\n"
        "if __name__ == '__main__':\n"
        "    for way in ('spawn', 'fork'):\n"
        "        with multiprocessing.get_context(way).Pool(2) as pool:\n"
        "            print([own.n for own in pool.map(double, [Own(1), Own(2)])])",
        0,
        "[2, 4]\n[2, 4]\n",
    ),
    "syntax": ("x = (", 1, ""),
}


@pytest.mark.parametrize("way", ENDS)
def test_scripts_end_as_under_python(way: str, script: Script) -> None:
    text, code, said = ENDS[way]
    done = run(script(text))
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert "Traceback" not in done.stderr


def test_exit_handlers_of_one_rank_have_the_grace_period(script: Script) -> None:
    """Not just the seconds in which mpirun ends several ranks, here fewer, once one has failed."""
    path = script(
        "import atexit, sys, time\n"
        "atexit.register(lambda: (time.sleep(1), print('uploaded', flush=True)))\nsys.exit(3)"
    )
    launcher = (
        "import sys\nfrom ktrainer.cli.main import main\nfrom ktrainer.launch import rank_group\n"
        f"rank_group.FAILURE_SECONDS = 0.2\nsys.exit(main(['run', {str(path)!r}]))"
    )
    done = python("-c", launcher)
    assert (done.returncode, done.stdout) == (3, "uploaded\n"), done.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError", ""])
def test_files_are_written_however_a_script_ends(end: str, script: Script, tmp_path: Path) -> None:
    """Exit handlers are called, too; of a rank that fails beside others they are not.

    A rank that another's failure ends on the way to its own writes nothing more.
    """
    text = (
        f"import atexit, os, sys\nfile = open({str(tmp_path)!r} + f'/{{os.getpid()}}.txt', 'w')\n"
        "atexit.register(lambda: file.write(', 43'))\nfile.write('42')\n"
    )
    run(path := script(text + end))
    alone = list(tmp_path.glob("*.txt"))
    assert [each.read_text() for each in alone] == ["42, 43"]
    run("-n", 2, path)
    texts = [each.read_text() for each in tmp_path.glob("*.txt") if each not in alone]
    written = [text.startswith("42") for text in texts]
    assert any(written) if end else written == [True, True]


@pytest.mark.exhaustive
def test_ranks_without_a_seed_draw_the_same(script: Script) -> None:
    path = script(
        RANK + "import random\nimport numpy as np\n"
        "print(random.random(), np.random.rand(), np.random.default_rng().random(),"
        " np.random.RandomState().rand(), list({'a', 'b', 'c', 'd', 'e'}))\n"
        "if rank == 0:\n    random.seed(1)\n    print('own', random.random())"
    )
    drawn = {}
    for words in ((), ("backend=data_parallel",), ("seed=1",)):
        lines = run("-n", 2, "--no-prefix", "--all-ranks", path, *words).stdout.splitlines()
        own, *both = sorted(lines, reverse=True)
        assert own == "own 0.13436424411240122"
        assert len(both) == 2, lines
        assert both[0] == both[1]
        drawn[words] = both[0]
    assert len(set(drawn.values())) == 3
    assert run(path, "seed=1").stdout.splitlines()[0].split(" [")[0] in drawn["seed=1",]


def test_an_hdf5_file_of_all_ranks_is_named_with_the_remedy(script: Script, tmp_path: Path) -> None:
    path = script(
        RANK + "import ktrainer.distributed, time\n"
        "here = ktrainer.distributed.current_world()\nimport h5py\n"
        f"path = {str(tmp_path / 'all.h5')!r}\n"
        "if rank == 0: file = h5py.File(path, 'w')\n"
        "here.barrier()\n"
        "if rank == 1: file = h5py.File(path, 'w')\n"
        "time.sleep(20)"
    )
    done = run("-n", 2, path)
    assert done.returncode == 1
    assert "BlockingIOError" in done.stderr
    assert 'trainer.save("NAME.keras")' in done.stderr.splitlines()[-1]


def test_a_file_that_another_rank_has_moved_is_named_with_the_remedy(
    script: Script, tmp_path: Path
) -> None:
    (old := tmp_path / "old.txt").touch()
    done = run("-n", 2, script(f"import os\nos.rename({str(old)!r}, {str(tmp_path / 'new')!r})"))
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
    assert "so another may have moved the file already" in done.stderr.splitlines()[-1]
