"""The plan: pure, printable, refused early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktrainer.cli import launch_config
from ktrainer.config import load_config
from ktrainer.distributed.world import SingleWorld
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import make_plan
from ktrainer.runtime.hardware import Hardware

PARALLEL = ["backend=data_parallel"]
PIPELINE = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=8"]


def plan(words=(), **facts):
    return make_plan(load_config(None, list(words)), Hardware(**facts))


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
    "engine, facts, chosen",
    [
        ("auto", {}, "mpi"),
        ("auto", {"horovod": True}, "mpi"),
        ("auto", {"horovod": True, "world": "mpi"}, "mpi"),
        ("auto", {"horovod": True, "world": "horovod"}, "horovod"),
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


@settings(max_examples=25)
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
    assert plan(PARALLEL, local_size=4, cores=8, threads=3).threads == 3
    assert plan([*PARALLEL, "world.threads=2"], cores=8, threads=3).threads == 2


@pytest.mark.parametrize("text, asked", [("3", 3), ("0", None), ("", None), ("many", None)])
def test_threads_of_the_environment(text, asked, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", text)
    assert Hardware.detect(SingleWorld()).threads == asked


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


def test_a_pipeline_alone_and_with_replicas():
    alone = plan(PIPELINE, size=2)
    assert (alone.partitions, alone.replicas, alone.engine) == (2, 1, None)
    assert alone.rank_batches == (32,)
    assert "2 partitions x 1 replica, 1f1b with 8 microbatches" in str(alone)
    assert "32 examples an update, 32 a replica and step" in str(alone)
    hybrid = plan([*PIPELINE, "data.batch_size=33", "backend.placement=spread"], size=6)
    assert (hybrid.partitions, hybrid.replicas, hybrid.engine) == (2, 3, "mpi")
    assert hybrid.rank_batches == (11, 11, 11)
    assert "2 partitions x 3 replicas (spread)" in str(hybrid)
    assert plan([*PIPELINE, "data.batch=per_worker"], size=4).rank_batches == (32, 32)
    whole = str(plan([*PIPELINE, "trainer.loss_scope=global"], size=2))
    assert "gpipe with 8 microbatches" in whole
    assert "gpipe in place of 1f1b" in whole
    assert "activations of all microbatches are kept" in whole
    chunks = ["backend.schedule=interleaved", "backend.chunks=2"]
    assert "2 partitions of 2 stages each x" in str(plan([*PIPELINE, *chunks], size=2))
    assert (plan(size=1).partitions, plan(size=1).replicas) == (1, 1)
    assert (plan(PARALLEL, size=3).partitions, plan(PARALLEL, size=3).replicas) == (1, 3)


@pytest.mark.parametrize(
    "partitions, size, says",
    [
        (4, 3, "3 processes are no multiple of 4 partitions: start with `ktrainer run -n 4`, or "
         "set backend.partitions=3"),
        (2, 1, "1 process is no .* `ktrainer run -n 2`, or set backend.partitions=1"),
        (3, 8, "`ktrainer run -n 6` or `ktrainer run -n 9`, or set backend.partitions=2"),
    ],
)  # fmt: skip
def test_processes_must_be_whole_pipelines(partitions, size, says):
    with pytest.raises(ConfigError, match=says) as caught:
        plan(["backend=pipeline", f"backend.partitions={partitions}"], size=size)
    assert (caught.value.path, caught.value.value) == ("backend.partitions", partitions)


@pytest.mark.parametrize("engine", ["auto", "horovod"])
def test_the_engine_of_a_pipelines_replicas(engine):
    words = [*PIPELINE, f"backend.engine={engine}"]
    assert plan(words, size=2).engine is None
    facts = {"gpus": 4, "local_size": 4, "horovod": True, "horovod_nccl": True}
    assert plan(words, size=4, **facts).engine == "horovod"
    with pytest.raises(ConfigError, match="ktrainer horovod build"):
        plan([*PIPELINE, "backend.engine=horovod"], size=4)


@pytest.mark.parametrize(
    "words, size, note",
    [
        (["data.batch_size=7"], 2, "batch of 7 examples is less than backend.microbatches=8"),
        (["data.batch_size=31"], 8, "batch of 7 examples"),
        (["data.batch_size=2"], 6, "less than 3 replicas"),
        (["backend.microbatches=1"], 2, "8 is a good start"),
        (["lr.scale=linear"], 4, "number of replicas"),
    ],
)
def test_notes_on_pipelines(words, size, note):
    made = plan([*PIPELINE, *words], size=size, cores=8)
    assert any(note in text for text in made.notes), made
    assert plan(PIPELINE, size=2, local_size=2, cores=2).notes == ()
    assert not any("replicas" in text for text in plan([*PIPELINE, "lr.scale=sqrt"], size=2).notes)


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
    facts = Hardware.detect(SingleWorld())
    assert (facts.size, facts.local_size) == (1, 1)
    assert facts.cores >= 1


def test_all_ranks_get_the_same_facts():
    one = Hardware.detect(Ranks(("elsewhere", {0, 1}, set(), False, False)))
    assert (one.size, one.horovod, one.horovod_nccl, one.own_gpu) == (2, False, False, False)


@pytest.mark.parametrize("words", [PARALLEL, PIPELINE], ids=["data_parallel", "pipeline"])
def test_what_horovod_lacks_is_refused(words):
    facts = {"gpus": 4, "local_size": 4, "horovod": True, "horovod_nccl": True}
    hierarchical = [*words, "backend.hierarchical=true"]
    with pytest.raises(ConfigError, match=r"backend\.compression=none or backend\.engine=mpi"):
        plan([*hierarchical, "backend.compression=bf16"], size=4, world="mpi", **facts)
    assert plan([*hierarchical, "backend.compression=bf16"], size=4).engine == "mpi"
    assert plan([*words, "backend.compression=bf16"], size=4, **facts).engine == "horovod"
    assert plan(hierarchical, size=4, world="mpi", **facts).engine == "horovod"
    assert plan(hierarchical, size=4).engine == "mpi"
    facts = {"horovod": True, "world": "mpi"}
    with pytest.raises(ConfigError, match="where it has NCCL and MPI"):
        plan([*hierarchical, "backend.engine=horovod"], size=4, **facts)


def test_horovod_makes_its_own_buckets():
    words, facts = [*PARALLEL, "backend.bucket_mb=4"], {"size": 4, "local_size": 4, "gpus": 4}
    facts |= {"horovod": True, "horovod_nccl": True}
    with pytest.raises(ConfigError, match="HOROVOD_FUSION_THRESHOLD") as caught:
        plan([*words, "backend.engine=horovod"], **facts)
    assert (caught.value.path, caught.value.value) == ("backend.bucket_mb", 4)
    assert "bucket_mb has no effect with engine horovod" in str(plan(words, **facts))
    assert "bucket_mb" not in str(plan([*words, "backend.engine=mpi"], **facts))


def test_a_launch_leaves_it_to_the_ranks_whether_horovod_has_nccl(monkeypatch):
    words = [*PARALLEL, "backend.engine=horovod", "backend.hierarchical=true"]
    monkeypatch.setattr(launch_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Horovod is not installed"):
        launch_config.checked_config("train.py", words, 2, None, {})
    monkeypatch.setattr(launch_config, "find_spec", lambda name: object())
    assert launch_config.checked_config("train.py", words, 2, None, {}).backend.hierarchical
    words += ["backend.compression=bf16"]
    with pytest.raises(ConfigError, match="exchanged flat"):
        launch_config.checked_config("train.py", words, 2, None, {})
