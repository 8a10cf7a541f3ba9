"""The plan: pure, printable, refused early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktrainer.config import load_config
from ktrainer.errors import ConfigError
from ktrainer.plan import WorldFacts, make_plan
from ktrainer.world.base import SingleWorld

PARALLEL = ["backend=data_parallel"]


def plan(words=(), **facts):
    return make_plan(load_config(None, list(words)), WorldFacts(**facts))


def test_local():
    made = plan(cores=4)
    assert (made.backend, made.engine, made.size, made.threads) == ("local", None, 1, 4)
    assert made.rank_batches == (32,)
    assert made.notes == ()


def test_local_is_one_process():
    with pytest.raises(ConfigError, match="backend=data_parallel") as caught:
        plan(size=2)
    assert caught.value.path == "backend"


@pytest.mark.parametrize(
    "words", [["backend=pipeline", "backend.partitions=2"], ["backend=tf_distribute"]]
)
def test_later_backends_are_refused(words):
    with pytest.raises(ConfigError, match="not part of this version"):
        plan(words, size=2)


@pytest.mark.parametrize(
    "engine, facts, chosen",
    [
        ("auto", {}, "mpi"),
        ("auto", {"horovod": True}, "mpi"),
        ("auto", {"gpus": 2}, "mpi"),
        ("auto", {"gpus": 2, "horovod": True}, "mpi"),
        ("auto", {"gpus": 2, "horovod": True, "horovod_nccl": True}, "horovod"),
        ("auto", {"gpus": 1, "horovod": True, "horovod_nccl": True}, "mpi"),
        ("auto", {"gpus": 2, "horovod": True, "horovod_nccl": True, "own_gpu": False}, "mpi"),
        ("mpi", {"gpus": 2, "horovod": True, "horovod_nccl": True}, "mpi"),
        ("horovod", {"horovod": True}, "horovod"),
    ],
)
def test_engines(engine, facts, chosen):
    made = plan([*PARALLEL, f"backend.engine={engine}"], size=2, local_size=2, cores=2, **facts)
    assert made.engine == chosen


def test_horovod_must_be_there():
    with pytest.raises(ConfigError, match="ktrainer horovod build") as caught:
        plan([*PARALLEL, "backend.engine=horovod"], size=2)
    assert (caught.value.path, caught.value.value) == ("backend.engine", "horovod")


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 64), st.integers(1, 9), st.booleans(), st.integers(1, 4))
def test_batches_over_ranks(batch, size, per_worker, accumulate):
    words = [*PARALLEL, f"data.batch_size={batch}", f"trainer.accumulate={accumulate}"]
    made = plan([*words, *["data.batch=per_worker"] * per_worker], size=size)
    assert len(made.rank_batches) == size
    assert max(made.rank_batches) - min(made.rank_batches) <= 1
    assert sum(made.rank_batches) == (batch * size if per_worker else batch)
    assert made.global_batch == sum(made.rank_batches) * accumulate


def test_threads():
    assert plan(PARALLEL, size=4, local_size=2, cores=8).threads == 4
    assert plan(PARALLEL, size=4, local_size=4, cores=2).threads == 1
    assert plan([*PARALLEL, "world.threads=3"], size=4, local_size=4, cores=2).threads == 3


@pytest.mark.parametrize(
    "words, facts, note",
    [
        (["data.batch_size=2"], {"size": 3}, "less than 3 processes"),
        (["lr.scale=linear"], {"size": 2}, "data.batch=global"),
        ([], {"size": 2, "local_size": 2, "gpus": 1}, "share 1 GPU"),
        ([], {"size": 2, "local_size": 2}, "share 1 core"),
        (["trainer.precision=mixed_float16"], {}, "slow on CPUs"),
        (["backend.op=sum"], {"size": 2}, "2 times"),
        ([], {"size": 2, "gpus": 1}, "host memory"),
    ],
)
def test_notes(words, facts, note):
    made = plan([*PARALLEL, *words], **facts)
    assert any(note in text for text in made.notes)
    assert note in str(made)


def test_it_prints():
    text = str(plan([*PARALLEL, "trainer.accumulate=2"], size=3, cores=6, local_size=3))
    assert "data_parallel, engine mpi" in text
    assert "3 processes on cpu, 2 threads each" in text
    assert "64 examples an update, 10 to 11 a rank and step" in text


class Ranks(SingleWorld):
    """A world whose other ranks gave these facts."""

    def __init__(self, *others):
        self.others, self.size = others, 1 + len(others)

    def allgather(self, value, what="allgather"):
        return [value, *self.others]


def test_facts_of_this_machine():
    facts = WorldFacts.detect(SingleWorld())
    assert (facts.size, facts.local_size) == (1, 1)
    assert facts.cores >= 1


def test_all_ranks_get_the_same_facts():
    one = WorldFacts.detect(Ranks(("elsewhere", {0, 1}, set(), False, False)))
    assert (one.size, one.horovod, one.horovod_nccl, one.own_gpu) == (2, False, False, False)
