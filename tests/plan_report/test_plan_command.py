"""`ktrainer plan`: what it shows of scripts and configurations, and what it refuses."""

from __future__ import annotations

import os
import re
import sys

import keras
import pytest

from ktrainer.cli import main
from ktrainer.config.command_line import launcher_words
from ktrainer.plan_report import planning_mode
from tests.dist.harness.group import ROOT
from tests.plan_report.scripts import PIPELINE, SCRIPT, SEQUENTIAL
from tests.processes import ktrainer, python


def test_a_pipelines_script(script, capsys, tmp_path):
    argv, folders = list(sys.argv), list(sys.path)
    assert main.main(["plan", script, "--own", *PIPELINE]) == 0
    out, err = capsys.readouterr()
    assert "2 partitions x 1 replica, 1f1b with 4 microbatches" in out
    assert "microbatches of 8 examples; costs are operations of the forward pass" in out
    assert re.search(r"0 +dense_0 .. dense_3 \(4\) +1,088 +4,352 .* 512 B: dense_3", out)
    # Adam: four times 4,352 bytes, and 8 x 16 x 4 for each of 4 layers, of two microbatches.
    assert re.search(rf"0 +0 +1,088 +{(4 * 4352 + 2 * 4 * 512) / 1000:.1f} kB", out)
    assert "rank 0  F0 F1 .  .  B0 -- F2 B1" in out
    # Slower than equal stages alone would be: what crosses the cut takes time too.
    assert re.search(r"speed-up  1\.[45]\d over one process, 1\.60 with equal stages", out)
    assert "is 1.60)" in out
    assert "trained" not in out
    assert "caught" not in out
    assert err == ""
    assert (sys.argv, sys.path) == (argv, folders)
    assert planning_mode.plan_request() is None
    assert os.listdir(tmp_path) == ["train.py"]


def test_the_loss_of_a_whole_batch(script, capsys):
    assert main.main(["plan", script, *PIPELINE, "trainer.loss_scope=global"]) == 0
    out = capsys.readouterr().out
    assert "2 partitions x 1 replica, gpipe with 4 microbatches" in out
    assert "rank 0  F0 F1 F2 F3" in out
    # Activations of all four microbatches.
    assert re.search(rf"0 +0 +1,088 +{(4 * 4352 + 4 * 4 * 512) / 1000:.1f} kB", out)


def test_options_before_and_after(script, capsys, tmp_path):
    picture = tmp_path / "schedule.svg"
    words = [*PIPELINE, "--processes", "4", f"--picture={picture}"]
    assert main.main(["plan", script, *words]) == 0
    out = capsys.readouterr().out
    assert "2 partitions x 2 replicas (cluster)" in out
    assert "microbatches of 4 examples" in out
    assert re.search(r" 2\.\d\d with 2 replicas", out)
    assert picture.read_text().startswith("<svg ")
    assert main.main(["plan", "--processes", "6", script, *PIPELINE]) == 0
    assert "6 processes on" in capsys.readouterr().out


def test_no_weights_are_made_for_a_pipeline(tmp_path, capsys):
    """Eight layers of 40 GB each."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("(16", "(100_000").replace("(64, 16)", "(64, 100_000)"))
    assert main.main(["plan", str(path), *PIPELINE]) == 0
    assert re.search(r"0 +0 +40,000,400,000 +640\.0 GB", capsys.readouterr().out)


def test_a_batch_of_fewer_examples_than_microbatches(config, capsys):
    assert main.main(["plan", config, "data.batch_size=3"]) == 0
    out = capsys.readouterr().out
    assert "cut into as many as it has" in out
    assert "schedule 1f1b, 3 microbatches" in out


def test_other_backends(script, capsys):
    assert main.main(["plan", script]) == 0
    out = capsys.readouterr().out
    assert "backend   local" in out
    assert "model     stack: 2,176 parameters, 8.7 kB; with gradients and optimizer 34.8 kB" in out
    words = ["-n", "3", script, "backend=data_parallel"]
    assert main.main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "3 processes on" in out
    # 2,176 numbers of 4 bytes, times 2 (3 - 1) / 3; with rank 1 two of 16 for 16 x 16 of them.
    assert "wire      each process sends 11.6 kB of gradients an update" in out
    products = ["backend.compression=powersgd", "backend.powersgd_rank=1"]
    assert main.main(["plan", *words, *products]) == 0
    assert "wire      each process sends 2.0 kB" in capsys.readouterr().out
    assert main.main(["plan", *words, "backend.local_layers=[dense_3]"]) == 0
    out = capsys.readouterr().out
    assert "local     272 of its parameters are each process's own" in out
    assert "each of 3 processes trains its own" in out


SUBCLASSED = """
import keras
import tensorflow as tf
from keras import layers
from ktrainer import Trainer

class Mine(keras.Model):
    def __init__(self):
        super().__init__(name="mine")
        self.stack = [layers.Dense(16, name=f"dense_{i}") for i in range(4)]

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x

trainer = Trainer.from_cli()
model = Mine()
model.compile("sgd", "mse")
x = tf.zeros((40, 16))
trainer.fit(model, tf.data.Dataset.from_tensor_slices((x, x)).batch(20, drop_remainder=True))
"""


PLAIN = """
import sys
import keras
import numpy as np
from keras import layers

stack = [layers.Dense(16, name=f"dense_{i}") for i in range(8)]
model = keras.Sequential([keras.Input((16,)), *stack], name="stack")
model.compile("adam", "mse")
x = np.zeros((64, 16), "float32")
print("own words", sys.argv[1:])
model.fit(x, x, epochs=3)
print("trained")
"""


def test_a_script_without_a_trainer(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(PLAIN)
    fit = keras.Model.fit
    assert main.main(["plan", str(path), "--own", *PIPELINE, "--", "a=b"]) == 0
    out = capsys.readouterr().out
    assert "own words ['--own', 'a=b']" in out
    assert "2 partitions x 1 replica, 1f1b with 4 microbatches" in out
    assert "rank 0  F0 F1 .  .  B0 -- F2 B1" in out
    assert "trained" not in out
    assert keras.Model.fit is fit
    assert main.main(["plan", "-n", "3", str(path), "backend=data_parallel"]) == 0
    assert "3 processes on" in capsys.readouterr().out
    assert keras.Model.fit is fit
    assert launcher_words == []


def test_each_plan_compares_a_trainer_with_its_words(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from ktrainer import Trainer\nTrainer({}).fit(len, 1)")
    for _ in range(2):
        assert main.main(["plan", str(path), "trainer.epochs=5"]) == 2
        assert "trainer.epochs has no effect" in capsys.readouterr().err


def test_strategies(script, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    words = ["backend=tf_distribute", "backend.devices=2"]
    assert main.main(["plan", script, *words]) == 0
    assert "strategy  mirrored on CPU:0, CPU:1\n" in capsys.readouterr().out
    words = ["backend=tf_distribute", "backend.strategy=multi_worker_mirrored"]
    assert main.main(["plan", "-n", "2", script, *words]) == 0
    said = capsys.readouterr().out
    assert "strategy  multi_worker_mirrored, 2 processes with CPU:0 each\n" in said
    words = ["backend=tf_distribute", "backend.strategy=parameter_server"]
    assert main.main(["plan", "-n", "3", script, *words]) == 0
    assert "strategy  parameter_server, 3 workers\n" in capsys.readouterr().out


def test_a_model_that_is_not_built_and_a_dataset_with_its_own_batches(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SUBCLASSED)
    assert main.main(["plan", str(path), *PIPELINE, "backend.costs=profile"]) == 0
    out = capsys.readouterr().out
    assert "microbatches of 5 examples; costs are seconds" in out
    assert "dense_" in out
    assert main.main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "mine: built by its first batch" in out
    assert "batch     20 examples an update, 20 a rank and step\n" in out
    small = [*PIPELINE, "data.batch_size=1"]
    assert main.main(["plan", str(path), *small]) == 0
    assert "is less than" not in capsys.readouterr().out
    path.write_text(SUBCLASSED.replace(", drop_remainder=True", ""))
    assert main.main(["plan", str(path)]) == 0
    said = "batch     that of the tf.data.Dataset; data.batch_size is for arrays\n"
    assert said in capsys.readouterr().out
    assert main.main(["plan", str(path), *small]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "is less than" not in out
    assert "stages and schedule are those of data.batch_size=1.\n" in out


def test_a_configuration_alone(config, capsys):
    words = ["backend.schedule=interleaved", "backend.chunks=2", "-n", "6"]
    assert main.main(["plan", config, *words]) == 0
    out = capsys.readouterr().out
    assert "2 partitions of 2 stages each x 3 replicas" in out
    assert "rank 1  " in out
    assert "stages, for" not in out
    assert main.main(["plan", config, "backend=local"]) == 0
    assert "backend   local" in capsys.readouterr().out


def test_stages_by_hand(script, tmp_path, capsys):
    stages = "backend.stages={0: 'dense_[0-1]', 1: 'dense_[2-7]'}"
    assert main.main(["plan", script, *PIPELINE, stages]) == 0
    assert re.search(r"1 +dense_2 .. dense_7 \(6\) +1,632", capsys.readouterr().out)
    path = tmp_path / "scopes.py"
    scoped = "first = layers.Dense(16, name='first')\n    with ktrainer.partition(1): stack = "
    text = SCRIPT.replace("import sys", "import sys, ktrainer").replace("stack = ", scoped)
    path.write_text(text.replace("*stack", "first, *stack"))
    assert main.main(["plan", str(path), *PIPELINE]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0 +first +272", out)
    assert re.search(r"1 +dense_0 .. dense_7 \(8\)", out)


def test_recomputation_is_no_gain_of_its_own(script, config, capsys):
    """Four passes for three: of 2 x 8 / 9 three quarters are left."""
    words = ["backend.microbatches=8", "backend.recompute=true"]
    assert main.main(["plan", config, *words]) == 0
    assert "speed-up  1.33 over one process, 1.33 with equal stages" in capsys.readouterr().out
    assert main.main(["plan", script, *PIPELINE, *words]) == 0
    out = capsys.readouterr().out
    assert re.search(r"speed-up  1\.[123]\d over one process, 1\.33 with equal stages", out)
    # Microbatches of 4: the first stage has received nothing that it must keep of two of them.
    assert f" {(4 * 4352 + 4 * 4 * 16 * 4) / 1000:.1f} kB" in out


def test_weights_that_stages_of_one_process_share_count_once(tmp_path, capsys):
    path = tmp_path / "train.py"
    twice = "x = inputs = keras.Input((16,))\n    for i in (0, 1, 0, 2): x = stack[i](x)\n"
    functional = f"{twice}    model = keras.Model(inputs, x)"
    path.write_text(SCRIPT.replace(f"model = keras.{SEQUENTIAL}", functional))
    words = ["backend.schedule=interleaved", "backend.chunks=2", "backend.costs=uniform"]
    assert main.main(["plan", str(path), *PIPELINE, *words]) == 0
    rows = capsys.readouterr().out
    assert re.search(r"^ +0 +0, 2 +272 ", rows, re.M)
    assert re.search(r"^ +1 +1, 3 +544 ", rows, re.M)


@pytest.mark.parametrize("script_text", ["", "raise SystemExit(0)"])
def test_a_script_without_fit(tmp_path, capsys, script_text):
    path = tmp_path / "train.py"
    path.write_text(script_text)
    assert main.main(["plan", str(path)]) == 2
    assert "without fit" in capsys.readouterr().err


def test_a_scripts_own_failure_is_its_own(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as caught:
        main.main(["plan", str(path)])
    assert caught.value.code == 7
    path.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        main.main(["plan", str(path)])
    assert main.main(["plan", str(tmp_path / "none.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


def test_what_is_neither_a_script_nor_a_configuration(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("# Not Python")
    assert main.main(["plan", str(path)]) == 2
    assert "neither a Python script (.py) nor a configuration" in capsys.readouterr().err


def test_png_needs_matplotlib(config, capsys, monkeypatch):
    monkeypatch.setattr("ktrainer.cli.plan_command.find_spec", lambda name: None)
    assert main.main(["plan", config, "--picture", "x.png"]) == 2
    assert "ask for x.svg, which needs nothing" in capsys.readouterr().err


def test_png_is_drawn_by_matplotlib(config, tmp_path):
    import tensorflow as tf

    path = tmp_path / "x.png"
    # In a process of its own: matplotlib keeps its fonts open.
    assert ktrainer("plan", config, "--picture", path).returncode == 0
    picture = tf.io.decode_png(path.read_bytes()).numpy()  # rows, columns, colours
    assert min(picture.shape[:2]) > 50
    assert len({tuple(color) for row in picture[::4, ::4] for color in row}) > 4


@pytest.mark.exhaustive
def test_in_a_process_of_its_own(tmp_path):
    """A real example, as a user would call it; nothing is trained or written."""
    done = ktrainer("plan", ROOT / "examples" / "digits.py", *PIPELINE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "speed-up" in done.stdout
    assert os.listdir(tmp_path) == []


def test_planning_a_configuration_loads_no_tensorflow(config):
    code = (
        "import sys\nfrom ktrainer.cli.main import main\n"
        f"assert main(['plan', {config!r}]) == 0\n"
        "assert not {'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
