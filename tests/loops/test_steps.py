"""What `trainer.steps` brings: resume to the bit, signals, the guard, schedules, logs, healing."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Callback, Trainer
from ktrainer.errors import ConfigError, DataError, Interrupted, ModelError
from tests.dist.harness import RankError
from tests.dist.small import more
from tests.loops import steps_script
from tests.loops.cases import row_counter
from tests.loops.steps_script import KEYS, Loop, arrays, batches
from tests.processes import script
from tests.tf_distribute.running import under
from tests.tf_distribute.test_features import trainer as trainer_of

SCRIPT = Path(steps_script.__file__)
EVERY_UPDATE = ("checkpoint.every=1ba", "seed=7")


@pytest.fixture(autouse=True)
def float64() -> Any:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def make(folder: Path | None, *words: str) -> Trainer:
    keras.utils.clear_session()
    here = [f"run.dir={folder}"] if folder else []
    return Trainer(KEYS, overrides=[*here, *words])


def whole(folder: Path, *words: str, **more: Any) -> Any:
    with make(folder, *words) as trainer:
        return Loop(trainer, 0.2).train(**more)


def launch(folder: Path, fault: str, *words: str, ranks: int = 1, heal: bool = False) -> Any:
    """The exit code and result of the script in real processes."""
    out = folder / "result.json"
    head: list[object] = []
    if ranks > 1:
        head += ["-m", "ktrainer.cli.main", "run", "-n", ranks, *(["--heal"] * heal)]
    mode = ["backend=data_parallel"] if ranks > 1 else []
    words = (f"run.dir={folder}", *mode, *words)
    ended = script(*head, SCRIPT, out, fault, *words, KERAS_BACKEND="tensorflow")
    found = json.loads(out.read_text()) if out.exists() else None
    return ended.returncode, found, ended.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> Any:
    """The result of a whole loop, which the process of any test has."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    found = whole(tmp_path_factory.mktemp("whole"), "checkpoint.every=1ba")
    keras.config.set_floatx(before)
    assert len(found["history"]["loss"]) == 3
    assert found["plain"]["count"] == 15
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: Any) -> Any:
    """The result of a whole loop in a process of its own."""
    code, found, said = launch(tmp_path_factory.mktemp("launched"), "none", *EVERY_UPDATE)
    assert code == 0, said
    return found


def stops_at(step: int) -> Callable[[int], bool]:
    return lambda now: now == step


@pytest.mark.quick("5")
@pytest.mark.parametrize("step", [0, 5, 14])
def test_a_loop_that_ends_at_any_step_resumes_to_the_bit(
    tmp_path: Path, undisturbed: Any, step: int
) -> None:
    """At the first, as the first of the second epoch, at the last."""
    whole(tmp_path, "checkpoint.every=1ba", at=stops_at(step))
    assert whole(tmp_path, "checkpoint.every=1ba") == undisturbed


@pytest.mark.quick
@pytest.mark.parametrize("fault", ["step:6", "save:7"])
def test_a_killed_process_resumes_to_the_bit(tmp_path: Path, launched: Any, fault: str) -> None:
    assert launch(tmp_path, fault, *EVERY_UPDATE)[0] == -signal.SIGKILL
    code, found, said = launch(tmp_path, "none", *EVERY_UPDATE)
    assert (code, found) == (0, launched), said


@pytest.mark.exhaustive
def test_killed_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    whole_run = tmp_path / "whole"
    whole_run.mkdir()
    code, expected, said = launch(whole_run, "none", *EVERY_UPDATE, ranks=2)
    assert code == 0, said
    assert launch(tmp_path, "step:6", *EVERY_UPDATE, ranks=2)[0] != 0
    code, found, said = launch(tmp_path, "none", *EVERY_UPDATE, ranks=2)
    assert (code, found) == (0, expected), said


def on_ranks(where: str, folder: str, step: int | None, dropout: float = 0.0) -> Any:
    """The loop of one process, under a backend; ended in the body of `step`, and run again."""
    keras.config.set_floatx("float64")
    keras.utils.clear_session()  # which keeps the type that layers are made with
    words = {"checkpoint__every": "1ba", "trainer__epochs": 3, "run__dir": folder}
    for at in [] if step is None else [step]:
        with trainer_of(where, **words) as trainer:
            Loop(trainer, dropout).train(at=stops_at(at))
    with trainer_of(where, **words) as trainer:
        loop = Loop(trainer, dropout)
        found = loop.train(lambda: trainer.distribute(batches()))
    keras.config.set_floatx("float32")
    keras.utils.clear_session()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["data_parallel", "mirrored"])
def test_under_other_backends(ranks: Callable[..., Any], tmp_path: Path, where: str) -> None:
    """The bits of the undisturbed loop there, and the numbers of one process."""
    alone = Loop(make(None, "checkpoint.every=null")).train()
    undisturbed = under(ranks, where, on_ranks, where, str(tmp_path / "whole"), None)
    again = under(ranks, where, on_ranks, where, str(tmp_path / "cut"), 7)
    assert again == undisturbed
    for found in again:
        assert found["plain"]["count"] == alone["plain"]["count"]
        for mine, value in zip(found["values"], alone["values"], strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-10, atol=1e-12)
        for name, logs in alone["history"].items():
            np.testing.assert_allclose(found["history"][name], logs, rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [0, 7])
def test_a_lost_rank_leaves_the_numbers_of_one_process(tmp_path: Path, step: int) -> None:
    expected = Loop(make(None, "checkpoint.every=null")).train()
    words = ("checkpoint.every=null", "world.deadline=30")
    code, found, said = launch(tmp_path, f"step:{step}", *words, ranks=3, heal=True)
    assert code == 0, said
    assert [h[1:] for h in found["healed"]] == [[[1], 2]]
    assert found["replicas"] == 2  # the step was traced again
    assert found["plain"]["drawn"] == expected["plain"]["drawn"]
    for mine, value in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-10, atol=1e-12)


def test_a_signal_ends_the_loop_with_a_checkpoint(tmp_path: Path, undisturbed: Any) -> None:
    def asks(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as ended:
        whole(tmp_path, "checkpoint.every=100ba", at=asks)
    assert (ended.value.code, ended.value.saved_at) == (75, 7)
    assert whole(tmp_path, "checkpoint.every=100ba") == undisturbed


def test_a_signal_before_a_break_is_not_lost(tmp_path: Path) -> None:
    def ends(step: int) -> bool:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step == 2

    with pytest.raises(KeyboardInterrupt):
        whole(tmp_path, "trainer.interrupt.signals=[SIGINT]", at=ends)


def minimal(trainer: Trainer, loss: Callable[[int], float], **given: Any) -> list[Any]:
    """The learning rate of each step of a loop that reports losses and trains on nothing."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    rates = []
    steps = trainer.steps(*arrays(), batch_size=8, model=model, optimizer=optimizer, **given)
    for _ in steps:
        rates.append(float(optimizer.learning_rate))
        steps.log(loss=loss(steps.step))
    return rates


def test_the_learning_rate_follows_its_schedule(tmp_path: Path) -> None:
    stages = 'lr.schedule=[{"start":"0ba","end":"3ba","multiplier":1.0},'
    stages += '{"start":"3ba","multiplier":0.5}]'
    rates = minimal(make(tmp_path, stages), lambda step: 1.0)
    assert rates == [0.1] * 3 + [0.05] * 12


def test_a_loss_that_is_not_finite_stops_the_loop(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the loss is not finite at step 5[\s\S]*Training stops"):
        rates = minimal(make(tmp_path), lambda step: float("nan") if step == 4 else 1.0)
    assert len(rates) == 5


def test_a_rollback_returns_to_the_checkpoint(tmp_path: Path) -> None:
    bad, state = iter([True]), {"count": 0}
    losses = lambda step: float("nan") if step == 4 and next(bad, False) else 1.0  # noqa: E731
    with pytest.warns(UserWarning, match="back to the checkpoint of step 4"):
        minimal(make(tmp_path, "health.nan=rollback", "checkpoint.every=2ba"), losses, state=state)


def test_loggers_and_progress(tmp_path: Path, capsys: Any) -> None:
    words = ("logging.csv=true", "logging.every=5ba", "logging.progress=plain")
    minimal(make(tmp_path, *words), lambda step: float(step))
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["event"], r["step"], r["loss"]) for r in rows] == [
        (event, step, f"{int(step) - 1}.0")
        for step in ("5", "10", "15")
        for event in ("log", "epoch")
    ]
    assert "epoch 3/3" in capsys.readouterr().out.lower()


def test_what_one_step_has_logged_is_the_epochs(tmp_path: Path) -> None:
    with make(tmp_path) as trainer, trainer.steps(batches(), epochs=2) as steps:
        for _ in steps:
            if steps.epoch_begins:
                steps.log(loss=float(steps.epoch))
        assert steps.history == {"loss": [0.0, 1.0]}


def test_each_piece_alone(tmp_path: Path) -> None:
    """Only the data; then a model only, without files."""
    off = ("checkpoint.every=null", "trainer.interrupt.signals=[]", "health.nan=ignore")
    off += ("trainer.loss_scope=local",)
    with make(tmp_path / "data", *off) as trainer:
        rows = [len(x) for x, _ in trainer.steps(*arrays(), batch_size=8, epochs=2)]
        assert rows == [8, 8, 8, 8, 1] * 2
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        assert len(list(trainer.steps(batches(), model=model, epochs=1))) == 5
    assert not list((tmp_path / "data").glob("checkpoints*"))


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["trainer.accumulate=2"], "trainer.accumulate"),
        (["trainer.clip.global_norm=1"], "trainer.clip.global_norm"),
        (["health.nan=skip"], "health.nan"),
        (["health.spike=3"], "health.spike"),
        (["trainer.xla=true"], "trainer.xla"),
        (["trainer.loss_scope=global"], "trainer.loss_scope"),
    ],
)
def test_settings_of_fit_alone_are_refused(tmp_path: Path, words: list[str], path: str) -> None:
    with make(tmp_path, *words) as trainer, pytest.raises(ConfigError, match=path):
        trainer.steps(*arrays())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with make(tmp_path, "checkpoint.every=1ba") as trainer:
        with pytest.raises(ModelError, match="state/file is a PosixPath"):
            trainer.steps(*arrays(), state={"file": tmp_path})
        for state, said in [
            ({"gan": {"mean": keras.metrics.Mean(), "count": 0}}, "state/gan/count is a plain"),
            ({"seen": {0: 1}}, "state/seen has the key 0"),
            ({"pairs": [(1, 2)]}, "state/pairs/0 is a tuple"),
            ({"best": {"range": (0, 1)}}, "state/best/range is a tuple"),
            ({"f1": keras.metrics.F1Score()}, "state/f1, F1Score, makes its variables in"),
            ({"fit": [keras.metrics.R2Score()]}, "state/fit/0, R2Score, makes its variables"),
            (
                {"own": keras.metrics.Metric()},
                "state/own, Metric, has no Keras variables.*leave it",
            ),
        ]:
            with pytest.raises(ModelError, match=said):
                trainer.steps(*arrays(), state=state)
        f1 = keras.metrics.F1Score()
        f1.update_state(np.zeros((1, 3)), np.zeros((1, 3)))
        f1.reset_state()
        assert next(trainer.steps(*arrays(), state={"f1": f1}))[0].shape == (32, 8)
        with pytest.raises(ModelError, match="has no variables yet"):
            trainer.steps(*arrays(), model=keras.Sequential([keras.layers.Dense(3)]))
        with pytest.raises(DataError, match="there is no data"):
            trainer.steps(None)
        later: dict[str, Any] = {}
        late = trainer.steps(*arrays(), state=later)
        assert next(late)[0].shape == (32, 8)
        later["mean"] = keras.metrics.Mean()
        with pytest.raises(ModelError, match="state/mean was put there after"):
            list(late)


def different(kind: str) -> None:
    with trainer_of("data_parallel") as trainer:
        rank = trainer.world.rank
        state = {"count": rank} if kind == "count" else {"mean": keras.metrics.Mean()}
        for batch in trainer.steps(batches(), state=state):
            if kind == "mean":
                state["mean"].update_state(batch[1])


@pytest.mark.parametrize("kind", ["count", "mean"])
def test_state_that_differs_between_ranks_is_named(ranks: Callable[..., Any], kind: str) -> None:
    with pytest.raises(
        RankError, match=f"DivergenceError[\\s\\S]*different values of state/{kind}"
    ):
        ranks(2).run(different, kind)


def counted_rows(strategy: str, folder: str) -> list[int]:
    """The rows that an integer metric has counted, at each step of two runs."""
    found = []
    for last in (1, None):
        with trainer_of(strategy, checkpoint__every="1ba", run__dir=folder) as trainer:
            with trainer.scope():
                rows = row_counter()
            x = np.zeros((3 * 33, 1))
            steps = trainer.steps(x, batch_size=33, epochs=1, state={"rows": rows})
            with steps:
                for batch in steps:
                    found.append(int(rows.result()))
                    if steps.step == last:
                        break
                    trainer.run(rows.update_state, batch)
    return found


@pytest.mark.parametrize("strategy", ["mirrored", more("multi_worker_mirrored")])
def test_an_integer_metric_resumes_whole(
    ranks: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    """It is in parts, one a replica, and no part is a half."""
    for found in under(ranks, strategy, counted_rows, strategy, str(tmp_path)):
        assert found == [0, 33, 33, 66]


class Halved(Callback):
    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return [gradient / 2 for gradient in gradients]


def test_a_gradient_hook_that_nothing_would_call_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as trainer, pytest.raises(ConfigError, match=r"Halved.*on_gradients"):
        trainer.steps(*arrays(), callbacks=[Halved()])
