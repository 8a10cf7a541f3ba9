"""Parameters of the script's own: `trainer.config.user`."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from ktrainer.config import load_config
from ktrainer.errors import ConfigError
from tests.processes import ktrainer

DEFAULTS: dict[str, Any] = {
    "user": {"lr": 1e-3, "width": 64, "optimizer": {"name": "adam", "decay": None}, "free": {}}
}


def user(*words: str, source: Any = None) -> Any:
    return load_config(source, words, defaults=DEFAULTS).user


def test_defaults_a_file_and_words_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("user: {width: 128, optimizer: {decay: 0.1}}\n")
    assert user() == DEFAULTS["user"]
    found = user("user.width=256", "user.free.a=[1, 2]", source=file)
    assert found.width == 256
    assert found.optimizer == {"name": "adam", "decay": 0.1}
    assert found.optimizer.name == "adam"
    assert found.free.a == [1, 2]


def test_a_whole_number_for_a_real_one() -> None:
    rate = user("user.lr=1").lr
    assert type(rate) is float
    assert rate == 1.0


def test_they_are_copied_and_changed_like_the_rest() -> None:
    config = load_config(None, ["user.width=3"], defaults=DEFAULTS)
    for copied in (copy.deepcopy(config.user), pickle.loads(pickle.dumps(config.user))):
        assert copied == config.user
        assert copied.optimizer.name == "adam"
    assert load_config(config, ["user.width=4"]).user.width == 4
    assert config.with_changes(seed=1).user.optimizer.decay is None
    assert config.to_dict()["user"]["width"] == 3
    assert config.origin("user.width") == "command line"
    assert config.origin("user.lr") is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("user.widht=1", "user.widht: the script has no parameter of this name. Did you mean 'wid"),
        ("user.momentum=1", "It has lr, width, optimizer, free."),
        ("user.optimizer.nam=sgd", "user.optimizer.nam: the script has no"),
        ("user.width=1.5", "user.width: expected int, as its default 64 is, got 1.5"),
        ("user.width=true", "expected int"),
        ("user.lr=fast", "expected float"),
        ("user.free=3", "user.free: expected a group"),
        ("user.free.items=3", "user.free.items: every dict has a method 'items'"),
        ("user.optimizer=sgd", "user.optimizer: expected a group"),
        ("user=3", "user: expected a group"),
        ("user=[1]", "user: expected a group of NAME: VALUE, got [1]."),
    ],
)
def test_what_the_script_does_not_know_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        user(word)


@pytest.mark.parametrize("layer", ["defaults", "source"])
@pytest.mark.parametrize("key", ["user", "callbacks", "logging.wandb", "backend.stages"])
def test_a_list_in_place_of_a_group_is_refused_by_its_key(layer: str, key: str) -> None:
    group, _, name = key.rpartition(".")
    tree: dict[str, Any] = {group: {name: [1]}} if group else {name: [1]}
    if group == "backend":
        tree["backend"]["name"] = "pipeline"
    with pytest.raises(ConfigError, match=rf"^{key}: expected a group of NAME: VALUE.*, got \[1\]"):
        load_config(**{layer: tree})


def test_secrets_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["user.api_key=[hunter2]"], defaults={"user": {"api_key": ""}})
    assert "hunter2" not in str(caught.value)


def test_a_dict_in_code_names_them_and_a_script_without_any_is_told_how() -> None:
    assert load_config({"user": {"a": 1}}, ["user.a=2"]).user.a == 2
    with pytest.raises(ConfigError, match="defaults="):
        load_config(None, ["user.a=2"], defaults={})
    with pytest.raises(AttributeError, match=r"no parameter 'b'; there are: a"):
        _ = load_config({"user": {"a": 1}}).user.b
    with pytest.raises(AttributeError, match="a configuration does not change"):
        load_config({"user": {"a": 1}}).user.a = 2


def test_tools_that_do_not_run_the_script_take_any() -> None:
    config = load_config(None, ["user.a=2"], on_unknown_callback=lambda error: None)
    assert config.user.a == 2


@pytest.mark.slow
def test_a_script_reads_them_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from ktrainer import Trainer\n"
        'trainer = Trainer.from_cli(defaults={"user": {"optimizer": {"lr": 0.1}}})\n'
        "rate = trainer.config.user.optimizer.lr\n"
        "open(f'rate-{trainer.world.rank}', 'w').write(str(rate))\n"
    )
    words = ["run", "-n", 2, script, "backend=data_parallel"]
    done = ktrainer(*words, "user.optimizer.lr=0.25", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rate-{rank}").read_text() == "0.25"
    done = ktrainer(*words, "user.optimizer.rate=0.25", cwd=tmp_path)
    assert done.returncode == 2
    assert "user.optimizer.rate: the script has no parameter of this name" in done.stderr
