"""The `ktrainer` command."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from ktrainer.cli import main
from ktrainer.config import Config, load_config
from ktrainer.errors import SetupError

HEAVY = "{'tensorflow', 'keras', 'horovod', 'mpi4py', 'numpy', 'omegaconf'}"


def test_help_is_quick_and_light():
    """By the time on a core, as the machine may be busy with something else; not what it waits."""
    code = (
        "import sys, time\nfrom ktrainer.cli.main import main\nassert main(['--help']) == 0\n"
        f"assert not {HEAVY} & set(sys.modules), sorted(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 0.3  # seconds
    for name in main.COMMANDS:
        assert name in done.stdout


def test_config_prints_the_resolved_configuration(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {epochs: 4}\n")
    assert main.main(["config", "--config", str(path), "seed=7", "backend=data_parallel"]) == 0
    out, err = capsys.readouterr()
    assert "# passes over the data.\n  epochs: 4\n" in out
    assert err == ""
    path.write_text(out)
    assert load_config(path) == load_config(
        {"seed": 7, "trainer": {"epochs": 4}, "backend": "data_parallel"}
    )


def test_config_takes_words_and_options_in_any_order(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    assert main.main(["config", "trainer.epochs=2", "--diff", "--config", str(path), "seed=3"]) == 0
    assert capsys.readouterr().out == "seed: 3\ntrainer:\n  epochs: 2\n"
    assert main.main(["config", "--no-comments"]) == 0
    assert "#" not in capsys.readouterr().out


def test_config_describes_keys(capsys):
    assert main.main(["config", "--describe", "data.batch_size"]) == 0
    assert "data.batch_size (a whole number; default 32)" in capsys.readouterr().out
    assert main.main(["config", "--describe"]) == 0
    assert "world.deadline" in capsys.readouterr().out


def test_mistakes_are_one_clear_message(capsys):
    assert main.main(["config", "trainer.epoch=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "trainer.epoch" in err
    assert "Did you mean 'trainer.epochs'?" in err


def test_callbacks_of_a_script_are_a_warning(capsys):
    assert main.main(["config", "--diff", "callbacks.a.type=my_own"]) == 0
    out, err = capsys.readouterr()
    assert "type: my_own" in out
    assert "warning: callbacks.a.type" in err
    assert main.main(["config", "callbacks.a.type=os.system"]) == 2


def test_secrets_are_not_printed(capsys, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "hunter2-swordfish")
    assert main.main(["config", "run.dir=x/${oc.env:MY_PASSWORD}"]) == 0
    assert "hunter2" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words, says",
    [
        (["lanch"], "Did you mean 'launch'?"),
        (["horovod"], "ktrainer horovod build"),
        (["qqqq"], "unknown command"),
    ],
)
def test_unknown_commands(words, says, capsys):
    assert main.main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, option",
    [
        (["run", "train.py", "seed=1", "-n", "2"], "-n"),
        (["launch", "train.py", "-n2"], "-n"),
        (["run", "-n", "2", "train.py", "--heal", "--", "x"], "--heal"),
        (["verify", "train.py", "--ranks=2"], "--ranks"),
        (["lr-find", "train.py", "--own", "--updates", "30"], "--updates"),
        (["submit", "train.py", "--nodes", "2"], "--nodes"),
    ],
)
def test_options_after_the_script_are_refused(words, option, capsys):
    """There is no such script, so an option that is not refused has another message."""
    assert main.main(words) == 2
    err = capsys.readouterr().err
    assert f"{option} follows the script, but is an option of ktrainer {words[0]}: write" in err
    assert main.main([words[0], "train.py", "--own", "--", option, "2"]) == 2
    assert "there is no script 'train.py'" in capsys.readouterr().err


def test_other_words(capsys):
    assert main.main(["--version"]) == 0
    assert main.main([]) == 0
    assert main.main(["horovod", "--help"]) == 0
    with pytest.raises(SystemExit) as caught:
        main.main(["config", "--help"])
    assert caught.value.code == 0


def fake(monkeypatch, run):
    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(main, "import_module", lambda name: module)


@pytest.mark.parametrize(
    "error, status", [(SetupError("no MPI here"), 2), (KeyboardInterrupt(), 130)]
)
def test_errors_of_sub_commands(error, status, monkeypatch, capsys):
    def run(args):
        raise error

    fake(monkeypatch, run)
    assert main.main(["horovod", "build"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_the_status_of_a_sub_command_is_returned(monkeypatch):
    fake(monkeypatch, lambda args: 7)
    assert main.main(["env"]) == 7


def test_a_reader_that_leaves_early_is_no_error():
    line = f"{sys.executable} -m ktrainer.cli.main config | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_defaults_are_what_config_prints():
    assert load_config() == Config()
