"""`ktrainer checkpoint` on checkpoints that a run has left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.checkpoint.export.export_model import untrusted_objects
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST, MODEL
from ktrainer.checkpoint.format.find_checkpoints import checkpoint_folders, select_checkpoint
from ktrainer.cli import main
from ktrainer.errors import CheckpointError
from tests.checkpoint.whole import write_checkpoint
from tests.faults.forging import forge
from tests.small import BATCH, build, data

RAN = Path("ran")  # in the folder of a test: what hostile code would leave there


def train(folder: Path, model: Any = build, **settings: Any) -> Any:
    words = {
        "run.dir": folder,
        "data.batch_size": BATCH,
        "trainer.epochs": 3,
        "checkpoint.every": "1ep",
        "checkpoint.best": "loss",
        "logging.progress": "none",
        **settings,
    }
    with Trainer(overrides=[f"{key}={value}" for key, value in words.items()]) as trainer:
        trainer.fit(model, data())
        trainer.save(folder / "saved.keras")
        return trainer.model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(folder)
    keras.utils.clear_session()
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def latest(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000018"


def test_list(copied: Path, capsys) -> None:
    assert main.main(["checkpoint", "list", str(copied)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(copied / "checkpoints")
    assert lines[1].split() == ["checkpoint", "step", "epoch", "size", "saved"]
    assert lines[2].split()[:3] == ["step-00000018", "18", "3"]
    assert "latest, best (loss=" in lines[2]
    assert lines[3].split()[:3] == ["step-00000012", "12", "2"]
    assert "latest" not in lines[3]
    (latest(copied) / "state.json").write_text("{}")
    (copied / "checkpoints" / "step-00000012" / MANIFEST).write_text("{")
    assert main.main(["checkpoint", "list", str(copied)]) == 0
    out = capsys.readouterr().out
    assert "BAD: " + str(latest(copied) / "state.json") in out
    assert "step-00000012     ?" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].update({MODEL: "x"}), f"'{MODEL}' among its files has no size"),
        (lambda m: m["arrays"].update(a=7), "'a' among its arrays has no file"),
        (lambda m: m.update(versions=["keras"]), "its 'versions' is no table"),
        (lambda m: m.update(metric=5), "its 'metric' is no table"),
    ],
)
def test_a_forged_manifest_is_bad(copied: Path, capsys, change: Any, message: str) -> None:
    forge(latest(copied), change)
    assert main.main(["checkpoint", "list", str(copied)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "step-00000018" in x)
    assert f"BAD: {message}" in line
    assert main.main(["checkpoint", "show", str(latest(copied))]) == 2
    assert message in capsys.readouterr().err


def test_show(run: Path, capsys) -> None:
    assert main.main(["checkpoint", "show", str(run)]) == 0
    out = capsys.readouterr().out
    assert str(latest(run)) in out
    assert "  step: 18\n" in out
    assert "  world_size: 1\n" in out
    assert "  partitions: 1\n" in out
    assert "metric: loss = " in out
    assert "keras 3." in out
    assert "model/sequential/dense/kernel  float32[6, 5]  in arrays-00001.safetensors" in out
    assert main.main(["checkpoint", "show", "--json", "--best", str(run / "checkpoints")]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 18


def test_verify(copied: Path, capsys) -> None:
    assert main.main(["checkpoint", "verify", str(copied)]) == 0
    assert capsys.readouterr().out.count(": whole") == 2
    for name in ("state.json", "arrays-00001.safetensors"):
        file = latest(copied) / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main.main(["checkpoint", "verify", str(copied)]) == 1
    out, err = capsys.readouterr()
    assert f"{latest(copied)}: BAD" in out
    assert "step-00000012: whole" in out
    for name in ("state.json", "arrays-00001.safetensors"):
        assert f"{latest(copied) / name}: its content is damaged" in err
    assert main.main(["checkpoint", "verify", str(latest(copied))]) == 1
    (latest(copied) / MANIFEST).write_text("no")
    assert main.main(["checkpoint", "verify", str(latest(copied))]) == 1


def test_mistakes(tmp_path: Path, run: Path, capsys) -> None:
    for words, message in [
        (["list", str(tmp_path)], "there is no checkpoint"),
        (["export", str(run), "model.pkl"], "must end in .keras"),
        (["export", str(run), "m.keras", "--model", "nowhere"], "MODULE:FUNCTION"),
        (["export", str(run), "m.keras", "--model", "nowhere_at_all:f"], "No module named"),
    ]:
        assert main.main(["checkpoint", *words]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


DAY = "2026-01-01"


def of_fits(folder: Path, saved: dict[str, str]) -> None:
    """A run whose calls of `fit` have saved at these times, two checkpoints each."""
    for number, (name, time) in enumerate(saved.items()):
        for step in (1, 2):
            facts = {"step": step, "serial": step, "saved": time}
            facts["metric"] = {"name": "loss", "value": number + step, "mode": "min"}
            path = folder / name / f"step-{step:08d}"
            write_checkpoint(path, {"a": np.zeros(1)}, {}, facts)


@pytest.mark.parametrize(
    ("saved", "last"),
    [
        (  # by time: the script was started again, and stopped in its first fit
            {"checkpoints": f"{DAY}T12:00:00+0100", "checkpoints-2": f"{DAY}T10:30:00+0000"},
            "checkpoints",
        ),
        (  # one second: by number
            dict.fromkeys((f"checkpoints{end}" for end in ("", "-2", "-10")), f"{DAY}T10:00:00Z"),
            "checkpoints-10",
        ),
        ({"checkpoints-2": "", "checkpoints-old": "never"}, "checkpoints-2"),
    ],
    ids=["time", "number", "unknown"],
)
def test_of_several_fits_the_one_that_saved_last(
    tmp_path: Path, saved: dict[str, str], last: str
) -> None:
    of_fits(tmp_path, saved)
    assert select_checkpoint(tmp_path).path == tmp_path / last / "step-00000002"
    assert select_checkpoint(tmp_path, best=True).path == tmp_path / last / "step-00000001"
    names = [folder.name for folder, _ in checkpoint_folders(tmp_path)]
    assert names == sorted(saved, key=lambda n: ("old" not in n, len(n), n))
    for path in (tmp_path / last).iterdir():
        forge(path, lambda manifest: manifest.pop("metric"))
    with pytest.raises(CheckpointError, match=f"{last}: no checkpoint .* folder of another fit"):
        select_checkpoint(tmp_path, best=True)


def test_export_of_several_fits(tmp_path: Path) -> None:
    """The model as the last one has left it."""
    words = [f"run.dir={tmp_path / 'run'}", "checkpoint.every=1ep", "logging.progress=none"]
    with Trainer(overrides=words) as trainer:
        for _ in range(2):
            trainer.fit(trainer.model or build(), data())
        ours = [w.numpy().tobytes() for w in trainer.model.weights]
    assert main.main(["checkpoint", "export", "run", "m.keras"]) == 0
    assert [w.numpy().tobytes() for w in keras.models.load_model("m.keras").weights] == ours


def test_without_tensorflow(run: Path) -> None:
    code = (
        "import sys\nfrom ktrainer.cli.main import main\n"
        "for action in ('list', 'show', 'verify'):\n"
        f"    assert main(['checkpoint', action, {str(run)!r}]) == 0\n"
        "assert not {'tensorflow', 'keras', 'mpi4py'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def variables(model: Any) -> list[bytes]:
    return [v.numpy().tobytes() for v in [*model.weights, *model.optimizer.variables]]


def test_export_equals_what_the_trainer_saves(run: Path, tmp_path: Path) -> None:
    """Weights and optimizer, so that Keras' own fit can continue."""
    assert main.main(["checkpoint", "export", str(run), "out/model.keras"]) == 0
    ours = keras.models.load_model(tmp_path / "out" / "model.keras")
    theirs = keras.models.load_model(run / "saved.keras")
    assert variables(ours) == variables(theirs)
    assert type(ours.loss) is type(theirs.loss)
    assert main.main(["checkpoint", "export", str(run), "w.weights.h5"]) == 0
    other = keras.Sequential([keras.Input((6,)), *build().layers])
    other.load_weights("w.weights.h5")
    assert [w.numpy().tobytes() for w in other.weights] == variables(ours)[: len(other.weights)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "w.weights.h5"]


def own_loss(y: Any, prediction: Any) -> Any:
    return keras.ops.mean(keras.ops.square(prediction[:, :1] - keras.ops.cast(y, "float32")))


def with_own_loss() -> Any:
    model = build()
    model.compile("adam", own_loss, run_eagerly=True)
    return model


class Doubled(keras.layers.Layer):
    """A class of the user's: only the user's code can make it."""

    def call(self, x: Any) -> Any:
        RAN.write_text("")
        return x * 2


def with_own_layer() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(4), Doubled(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    return model


def test_a_loss_of_ones_own_is_left_out(tmp_path: Path) -> None:
    model = train(tmp_path / "run", with_own_loss)
    assert main.main(["checkpoint", "export", "run", "m.keras"]) == 0
    loaded = keras.models.load_model("m.keras")
    assert not loaded.compiled
    for ours, theirs in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_a_model_of_ones_own_classes_needs_its_function(tmp_path: Path, capsys) -> None:
    model = train(tmp_path / "run", with_own_layer)
    RAN.unlink()
    assert main.main(["checkpoint", "export", "run", "m.weights.h5"]) == 2
    err = capsys.readouterr().err
    assert "Doubled" in err
    assert "--model MODULE:FUNCTION" in err
    assert not RAN.exists()
    function = f"{with_own_layer.__module__}:with_own_layer"
    words = ["checkpoint", "export", "run", "m.weights.h5", "--model", function]
    assert main.main(words) == 0
    other = keras.Sequential([keras.Input((6,)), *with_own_layer().layers])
    other.load_weights("m.weights.h5")
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.parametrize(
    ("described", "names"),
    [
        ({"class_name": "Lambda", "module": "keras.layers"}, ["keras.layers.Lambda"]),
        ({"class_name": "TFSMLayer", "module": "keras.layers"}, ["keras.layers.TFSMLayer"]),
        ({"class_name": "__lambda__"}, ["None.__lambda__"]),
        ({"class_name": "function", "module": "os", "config": "system"}, ["os.system"]),
        ({"class_name": "function", "module": "keras.utils", "config": "f"}, ["keras.utils.f"]),
        ({"class_name": "get_file", "module": "keras.src.utils.file_utils"},
         ["keras.src.utils.file_utils.get_file"]),
        ({"class_name": "Popen", "module": "subprocess"}, ["subprocess.Popen"]),
        ({"class_name": "Dense"}, ["None.Dense"]),
        ({"class_name": ["Dense"], "module": "keras.layers"}, ["keras.layers.['Dense']"]),
        ({"class_name": "Dense", "module": "keras.layers"}, []),
        ({"class_name": "Add", "module": "keras.src.ops.numpy"}, []),
        ({"vocabulary": "/etc/passwd"}, ["the file /etc/passwd"]),
    ],
)  # fmt: skip
def test_what_is_foreign(described: dict[str, Any], names: list[str]) -> None:
    assert untrusted_objects({"config": {"layers": [described]}}) == names
