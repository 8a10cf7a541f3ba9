"""Everything that is wrong is a ConfigError with path, value and the nearest name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ktrainer.config import load_config
from ktrainer.errors import ConfigError


def refused(words, source=None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source, words)
    assert "omegaconf" not in str(caught.value).lower()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


@pytest.mark.parametrize(
    "word, path, near",
    [
        ("trainer.epoch=3", "trainer.epoch", "trainer.epochs"),
        ("epochs=3", "epochs", "trainer.epochs"),
        ("batch_size=3", "batch_size", "data.batch_size"),
        ("trainer.batch_size=3", "trainer.batch_size", "data.batch_size"),
        ("Trainer.epochs=3", "Trainer", "trainer"),
        ("data.batchsize=3", "data.batchsize", "data.batch_size"),
        ("checkpoint.resum=auto", "checkpoint.resum", "checkpoint.resume"),
        ("trainer.clip.global=1", "trainer.clip.global", "trainer.clip.global_norm"),
        ("lr.schedule=[{mult: 1}]", "lr.schedule[0].mult", "multiplier"),
        ("trainer.max-steps=3", "trainer.max-steps", "trainer.max_steps"),
    ],
)
def test_unknown_keys(word, path, near):
    error = refused([word])
    assert error.path == path
    assert f"Did you mean {near!r}?" in str(error)
    assert path in str(error)


def test_an_unknown_key_without_a_likeness_lists_what_there_is():
    assert "checkpoint, lr, logging" in str(refused(["qqqq=3"]))
    assert "batch, batch_size" in str(refused(["data.qqqq=3"]))
    assert "start, multiplier" in str(refused(["lr.schedule=[{qqqq: 1}]"]))
    assert "engine, compression" in str(refused(["backend=data_parallel", "backend.qqqq=1"]))


@pytest.mark.parametrize(
    "word, path",
    [
        ("lr.schedule=[{start:1ep, multiplier: 0.1}]", "lr.schedule[0].start:1ep"),
        ("lr.schedule=[{start: 1ep, multiplier:0.1}]", "lr.schedule[0].multiplier:0.1"),
        ("trainer.clip={norm:1}", "trainer.clip.norm:1"),
        ("callbacks={goal:{type: early_stopping}}", "callbacks"),
        ("callbacks={goal: {type:early_stopping}}", "callbacks.goal"),
    ],
)
def test_a_colon_without_a_space(word, path):
    error = refused([word])
    assert error.path == path
    assert "a space after" in str(error)


def test_a_key_of_another_backend_says_whose_it_is():
    error = refused(["backend.engine=mpi"])
    assert (error.path, error.value) == ("backend.engine", "mpi")
    assert "backend=data_parallel" in str(error)
    assert "backend=pipeline" in str(refused(["backend=data_parallel", "backend.microbatches=2"]))
    near = "Did you mean 'backend.microbatches' of backend=pipeline?"
    assert near in str(refused(["backend.microbatch=2"]))


@pytest.mark.parametrize(
    "word, known",
    [
        ("backend=data_paralel", "data_parallel"),
        ("backend=Local", "local"),
        ("backend=DATA_PARALLEL", "data_parallel"),
        ("data.batch=globl", "global"),
        ("trainer.precision=mixed_bfloat", "mixed_bfloat16"),
        ("lr.scale=liner", "linear"),
    ],
)
def test_unknown_choices(word, known):
    error = refused([word])
    key, _, value = word.partition("=")
    assert (error.path, error.value) == (key, value)
    assert f"Did you mean {known!r}?" in str(error)


def test_names_used_elsewhere_are_explained():
    assert "backend=data_parallel backend.engine=horovod" in str(refused(["backend=horovod"]))
    assert "backend.strategy=mirrored" in str(refused(["backend=mirrored"]))
    assert "backend.strategy=parameter_server" in str(refused(["backend=ps"]))
    error = refused(["backend=tf_distribute", "backend.strategy=mwms"])
    assert "'mwms' is backend.strategy=multi_worker_mirrored here" in str(error)


@pytest.mark.parametrize(
    "word, expected",
    [
        ("trainer.epochs=ten", "a whole number"),
        ("trainer.epochs=1.5", "a whole number"),
        ("trainer.epochs=null", "a whole number"),
        ("trainer.epochs=true", "a whole number"),
        ("trainer.epochs=[1]", "a whole number"),
        ("trainer.epochs={a: 1}", "a whole number"),
        ("trainer.epochs=0", "at least 1"),
        ("trainer.xla=3", "true or false"),
        ("trainer.xla=maybe", "true or false"),
        ("world.deadline=soon", "a number"),
        ("world.deadline=0", "above 0"),
        ("world.deadline=.inf", "above 0"),
        ("world.deadline=.nan", "above 0"),
        ("trainer.limit_train_batches=1.5", "at most 1.0"),
        ("trainer.limit_train_batches=many", "a whole number or a fraction"),
        ("trainer.limit_train_batches=0", "above 0"),
        ("trainer.fast_dev_run=-1", "at least 0"),
        ("run.dir=[1]", "text or null"),
        ("lr.schedule=5", "a list"),
        ("allow=x", "a list"),
        ("callbacks=5", "a group"),
        ("seed=-1", "at least 0"),
        ("seed=4294967296", "at most 4294967295"),
        ("checkpoint.every=5", "no unit"),
        ("checkpoint.every=5 apples", "not a duration"),
        ("checkpoint.every=0ep", "longer than zero"),
        ("trainer.max_time=5ep", "time ('10m')"),
        ("trainer.max_time=5", "no unit: write '5s' for seconds."),
        ("lr.warmup=5", "no unit: write '5ep' for epochs or '5ba' for updates."),
        ("lr.warmup=soon", "such as '1ep' (epochs) or '500ba' (updates)."),
        ("lr.warmup=[1]", "a duration such as '1ep', '500ba' or null"),
        ("lr.warmup=5m", "epochs ('1ep') or updates ('500ba')"),
        ("data.batch=null", "one of global, per_worker"),
    ],
)
def test_wrong_types_and_bounds(word, expected):
    error = refused([word])
    assert error.path == word.partition("=")[0]
    assert expected in str(error)


@pytest.mark.parametrize("value", [5, "x", None, [1]])
def test_a_value_where_a_group_belongs(value):
    error = refused([], {"trainer": value})
    assert error.path == "trainer"
    assert "epochs" in str(error)


@pytest.mark.parametrize("value", [None, 3, [1]])
def test_a_backend_is_a_name_or_a_group(value):
    assert refused([], {"backend": value}).path == "backend"


@pytest.mark.parametrize(
    "words, path",
    [
        (["trainer.clip.norm=1", "trainer.clip.value=1"], "trainer.clip"),
        (["trainer.deterministic=true", "seed=null"], "trainer.deterministic"),
        (["trainer.overfit_batches=2", "trainer.limit_train_batches=3"], "trainer.overfit_batches"),
        (["checkpoint.mode=max"], "checkpoint.mode"),
        (["backend=data_parallel", "backend.powersgd_rank=8"], "backend.powersgd_rank"),
        (["lr.schedule=[{start: 5ep, multiplier: 1, end: 3ep}]"], "lr.schedule[0].end"),
    ],
)
def test_contradictions(words, path):
    assert refused(words).path == path


def test_required_values():
    error = refused(["backend=pipeline"])
    assert (error.path, error.value) == ("backend.partitions", "???")
    assert refused(["lr.schedule=[{start: 1ep}]"]).path == "lr.schedule[0].multiplier"
    error = refused([], {"seed": "???", "run": {"dir": "???"}})
    assert "run.dir=..., seed=..." in str(error)
    assert (
        refused(["callbacks.a={type: loss_guard, patience: '???'}"]).path == "callbacks.a.patience"
    )


@pytest.mark.parametrize(
    "word, says",
    [
        ("run.dir=${oc.env:KT_NOT_SET}", "environment variable KT_NOT_SET is not set"),
        ("run.dir=${run.dir}", "refers to itself"),
        ("run.dir=${nope.x}", "nope"),
        ("run.dir=${nope:x}", "nope"),
        ("run.dir=${", "not complete"),
        ("seed=${run}", "expected a whole number"),
        ("trainer=${data}", "trainer"),
        ("trainer=${seed}", "trainer"),
        ("backend=${oc.env:KT_NOT_SET}", "KT_NOT_SET"),
        ("backend=${seed}", "there is no backend 0"),
    ],
)
def test_interpolations(word, says):
    error = refused([word])
    assert says in str(error)


def test_interpolated_numbers_of_the_wrong_kind(monkeypatch):
    monkeypatch.setenv("KT_HALF", "0.5")
    error = refused(["trainer.limit_train_batches=${oc.env:KT_HALF}"])
    assert "${oc.decode:" in str(error)
    word = "trainer.limit_train_batches=${oc.decode:${oc.env:KT_HALF}}"
    assert load_config(None, [word]).trainer.limit_train_batches == 0.5


@pytest.mark.parametrize(
    "word, says",
    [
        ("epochs", "write key=value"),
        ("checkpoint.best=", "checkpoint.best=null is none"),
        ("seed= ", "nothing after the ="),
        ("=3", "write key=value"),
        ("+trainer.epochs=3", "write trainer.epochs=VALUE"),
        ("--trainer.epochs=3", "write trainer.epochs=VALUE"),
        ("lr.schedule[0].multiplier=3", "whole list"),
        ("trainer..epochs=3", "single dots"),
        ("run.dir=*x", "cannot read the value"),
        ("run.dir=!!python/object/apply:os.system [true]", "cannot read the value"),
    ],
)
def test_words_that_are_no_overrides(word, says):
    assert says in str(refused([word]))


def test_one_text_is_no_list_of_words():
    with pytest.raises(ConfigError, match="list of"):
        load_config(None, "seed=3")


@pytest.mark.parametrize(
    "text, says",
    [
        ("trainer: [\n", "line 2"),
        ("- a\n- b\n", "keys and values"),
        ("just text\n", ""),
        ("seed: 1\nseed: 2\n", "duplicate"),
        ("seed: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("run: {dir: '${oops'}\n", "not complete"),
        ("1: 2\n", "keys are text"),
        ("a: &a [*a]\n", "contains itself"),
        ("trainer.epochs: 3\n", "nest the groups"),
        ("seed: \x00", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert says in str(refused([], path))


def test_an_alias_bomb_is_refused_before_it_grows(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert "expands to more than" in str(refused([], path))
    flow = "{" + ", ".join(lines) + "}"
    assert "expands to more than" in str(refused([f"callbacks={flow}"]))


def test_deep_nesting_is_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("callbacks: {a: " + "[" * 2000 + "]" * 2000 + "}")
    refused([], path)
    refused(["callbacks.a=" + "[" * 2000])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "train.yaml").write_text("seed: 1")
    error = refused([], tmp_path / "trian.yaml")
    assert "train.yaml" in str(error).split("Did you mean")[1]
    assert "cannot read" in str(refused([], tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xff")
    refused([], tmp_path / "binary.yaml")


def test_objects_belong_in_code():
    error = refused([], {"callbacks": {"a": {"type": "loss_guard", "f": print}}})
    assert error.path == "callbacks.a.f"
    assert "Trainer(cfg, callbacks=[...])" in str(error)
    assert "path, a dict or nothing" in str(refused([], 5))


def test_refusing_loads_no_tensorflow():
    code = (
        "import sys\n"
        "from ktrainer.config import load_config\n"
        "from ktrainer.errors import ConfigError\n"
        "for words in (['callbacks.a.type=os.system'], ['callbacks.a.type=early_stop'], ['a=1'],\n"
        "              ['callbacks.a.type=early_stopping']):\n"
        "    try: load_config(None, words)\n"
        "    except ConfigError: pass\n"
        "assert not {'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "path", "says"),
    [
        (["backend.local_layers=[head]"], "backend.local_layers", "a key of backend=data_parallel"),
        (
            ["backend=data_parallel", "backend.local_layers=[head, 'a(']"],
            "backend.local_layers[1]",
            "no regular expression",
        ),
        (
            ["backend=data_parallel", "backend.local_layers=[a]", "trainer.clip.global_norm=1"],
            "backend.local_layers",
            "Use trainer.clip.norm",
        ),
        (
            [
                "backend=data_parallel",
                "backend.local_layers=[a]",
                "trainer.precision=mixed_float16",
            ],
            "backend.local_layers",
            "Use mixed_bfloat16",
        ),
    ],
)
def test_local_layers(words, path, says):
    error = refused(words)
    assert error.path == path
    assert says in str(error)


def test_a_rank_of_powersgd_that_the_script_has_set():
    backend = {"name": "data_parallel", "compression": "powersgd", "powersgd_rank": 2}
    assert load_config({"backend": backend}).backend.powersgd_rank == 2
