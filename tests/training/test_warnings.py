"""Warnings of real runs are in their record, their report, and on the screen."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktrainer import Callback, Trainer, load_config
from ktrainer.cli.main import main
from ktrainer.runs.run_marks import stood_out
from ktrainer.runs.run_record import RunRecord
from tests.small import build, data
from tests.tf_distribute.test_features import trainer


class Warns(Callback):
    """Warns on rank 1 before the third update, on all before the fifth."""

    def on_step_begin(self, step: int) -> None:
        if step == 2 and self.world.rank == 1:
            warnings.warn("rows are odd", stacklevel=1)
        if step == 4:
            logging.getLogger("reader").warning("the disk is slow")


def warned(folder: str, slow: str) -> None:
    words = {"run__dir": folder, "data__batch_size": 4, "logging__slow": slow}
    with trainer("data_parallel", callbacks=[Warns()], **words) as it, warnings.catch_warnings():
        warnings.simplefilter("always")
        it.fit(build, data())


@pytest.mark.parametrize("slow", ["0.1", "null"])
def test_those_of_all_ranks_are_recorded(
    ranks: Callable[..., Any], tmp_path: Path, slow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where ranks compare nothing before the end of an epoch."""
    ranks(2).run(warned, str(tmp_path), slow)
    record = RunRecord(tmp_path)
    found = [event for event in record.events if event["event"] == "warning"]
    assert [each["step"] for each in found if each["message"] == "rows are odd"] == [2]
    assert [each["ranks"] for each in found if each["message"] == "rows are odd"] == [[1]]
    disk = [each for each in found if each["message"] == "the disk is slow"]
    assert [(each["step"], each["kind"]) for each in disk] == [(4, "reader")] * 2
    assert sorted(rank for each in disk for rank in each["ranks"]) == [0, 1]
    seen = stood_out(record)
    assert "warning after step 2 on rank 1: rows are odd (UserWarning)" in seen
    assert "warning after step 4 on ranks 0, 1: the disk is slow (reader)" in seen
    assert main(["watch", str(tmp_path)]) == 0
    assert "warning on rank 1, test_warnings.py:" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "rows are odd" in (tmp_path / "report.html").read_text()


class Fails(Callback):
    def on_step_begin(self, step: int) -> None:
        if step == 3:
            warnings.warn("it begins with hunter2", stacklevel=1)
            raise KeyError("it ends")


def test_the_last_one_before_an_error_is_recorded(tmp_path: Path) -> None:
    """Without the secret that it has."""
    words = ["data.batch_size=4", "logging.progress=none", f"run.dir={tmp_path}"]
    config = {"user": {"api_key": "hunter2"}}
    with (
        pytest.warns(UserWarning, match="begins with hunter2"),
        pytest.raises(KeyError),
        Trainer(config, [Fails()], words) as it,
    ):
        it.fit(build, data())
    events = RunRecord(tmp_path).events
    assert events[-1]["event"] == "end"
    (warning,) = [event for event in events if event["event"] == "warning"]
    assert (warning["step"], warning["message"]) == (3, "it begins with ***")
    assert warning["where"].startswith("test_warnings.py:")


@pytest.mark.parametrize(
    ("mask_zero", "use_cudnn", "warns"),
    [(True, "auto", True), (False, "auto", False), (True, False, False)],
)
def test_masks_for_cudnn_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, mask_zero: bool, use_cudnn: Any, warns: bool
) -> None:
    import keras

    from ktrainer.training import fit_settings

    monkeypatch.setattr(fit_settings, "accelerator", lambda: "GPU:0")  # this host has none
    layers = [keras.layers.Embedding(5, 3, mask_zero=mask_zero)]
    layers += [keras.layers.Bidirectional(keras.layers.LSTM(2, use_cudnn=use_cudnn, name="words"))]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit_settings.check_model(model, load_config())
    assert [("words" in str(each.message)) for each in found] == [True] * warns
    assert all("use_cudnn=False" in str(each.message) for each in found)
