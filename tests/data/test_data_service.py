"""The tf.data service: the batches of a run without it, also through failures of its processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

from ktrainer import distributed
from ktrainer.cli import spark_data_service
from ktrainer.cli.data_service_command import listed_path
from ktrainer.config import DataConfig, DataServiceConfig, load_config
from ktrainer.config.data_service_file import (
    TfDataServiceConfig,
    check_size,
    check_workers,
    dispatcher_file,
    write_json,
)
from ktrainer.data import data_service, make_feed, send_to_data_service
from ktrainer.data.dataset_source import DatasetSource
from ktrainer.data.prefetch_thread import checked_waits
from ktrainer.data.service_source import ServiceSource
from ktrainer.distributed import SingleWorld
from ktrainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    SetupError,
    WorldError,
)
from ktrainer.launch.process_tree import wait_until_ended
from tests.data.rank_data import shuffled_without_seed
from tests.data.services import Service, service
from tests.dist.harness import Ranks
from tests.processes import script, warm_python

Group = Callable[..., Ranks]
ROWS = 53


def shuffled() -> tf.data.Dataset:
    """Seven batches, the last of which is smaller, in another order in each epoch."""
    tf.random.set_seed(3)
    x = np.arange(ROWS, dtype=np.float64)
    return tf.data.Dataset.from_tensor_slices((x, -x)).shuffle(20, seed=5).batch(8)


def with_empty_batches() -> tf.data.Dataset:
    """Batches of numbers 1, 2, 4 and 5, and two without rows; how many, TensorFlow cannot tell."""
    numbers = tf.data.Dataset.range(6).filter(lambda number: number >= 0)
    return numbers.map(lambda number: tf.repeat([number], number % 3))


def wide(batches: int) -> tf.data.Dataset:
    """Batches that are too large for all of them to be sent ahead."""
    return tf.data.Dataset.range(4 * batches).map(lambda i: tf.fill([3000], i)).batch(4)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose servers are the processes that it has started."""
    with service(tmp_path_factory.mktemp("service"), "-n", "1", "--threads", "1") as started:
        yield started


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service for tests that kill its worker: the next one need not import TensorFlow."""
    folder, words = tmp_path_factory.mktemp("failing"), ("-n", "1", "--threads", "1")
    with service(folder, *words, python=warm_python()) as started:
        yield started


def source(path: Path, dataset: tf.data.Dataset, **changes: Any) -> ServiceSource:
    settings: dict[str, Any] = {"round_robin": True, "deadline": 5.0, "sliced": True}
    found = TfDataServiceConfig.read(path)
    return ServiceSource(dataset, service=found, world=SingleWorld(), **{**settings, **changes})


def numbers(pieces: Iterator[Any]) -> list[list[float]]:
    return [np.ravel(tf.nest.flatten(piece.batch)[0])[::1].tolist() for piece in pieces]


def firsts(pieces: Iterator[Any]) -> list[int]:
    return [int(piece.batch[0, 0]) for piece in pieces]


def test_every_epoch_and_every_resume_is_that_of_the_pipeline(one):
    local = DatasetSource(shuffled(), world=SingleWorld(), sliced=True)
    with closing(source(one.path, shuffled())) as remote:
        for epoch in range(3):
            assert numbers(remote.open(epoch, 0)) == numbers(local.open(epoch, 0))
        assert "the tf.data service, " in str(remote.slow_stage())
        pieces, rest = local.open(3, 0), numbers(remote.open(3, 3))
        assert len(numbers(islice(pieces, 3))) == 3
        state = local.state()  # of a run that had no service
        assert state is not None
        assert rest == numbers(remote.open_at(3, 3, state)) == numbers(pieces)
    with closing(source(one.path, with_empty_batches())) as remote:
        assert numbers(remote.open(0, 2)) == [[4], [5, 5]]


def shuffled_twice() -> tf.data.Dataset:
    """Rows of shuffled files, shuffled: the second shuffle draws as it is read."""
    tf.random.set_seed(3)
    files = tf.data.Dataset.range(6).shuffle(6, seed=1)
    rows = files.interleave(lambda n: tf.data.Dataset.range(10 * n, 10 * n + 4), cycle_length=2)
    return rows.shuffle(5, seed=2).batch(8)


@pytest.mark.parametrize("make", [shuffled, shuffled_twice])
def test_a_second_call_on_the_same_pipeline_has_its_orders(one, make):
    """Also where the first one was cut, or the script resumes in the second one."""
    config = DataConfig(service=DataServiceConfig(str(one.path)))

    def orders(config: DataConfig, data: Any, *epochs: int, limit: Any = None) -> list[Any]:
        world = SingleWorld()
        feed = make_feed(data, world=world, config=config, training=True, limit=limit)
        with closing(feed):
            if not epochs:  # a call that ended before the script was resumed
                feed.read_up_to(2, 0)
            return [[np.ravel(tf.nest.flatten(s.batch)[0]).tolist() for s in feed.read(epoch)]
                    for epoch in epochs]  # fmt: skip

    def every(config: DataConfig) -> list[Any]:
        data = make()
        cut = orders(config, data, 0, 1, limit=2)
        return [*cut, *orders(config, data, 0, 1), *orders(config, data, 0, 1)]

    expected, other = every(DataConfig()), make()
    assert every(config) == expected
    assert len({str(epoch) for epoch in expected}) == 6
    orders(config, other, limit=2)
    orders(config, other)
    assert orders(config, other, 0) == expected[4:5]


@pytest.mark.parametrize("above", ["repeat", "concatenate", "cache"])
def test_shuffles_whose_seeds_depend_on_what_is_read_are_refused(one, above):
    rows = tf.data.Dataset.range(8).shuffle(8, seed=1)
    argument = {"repeat": 2, "concatenate": rows, "cache": ""}[above]
    batches = getattr(rows, above)(argument).batch(4)
    with pytest.raises(DataError, match=r"below a repeat, .*\. Shuffle after"):
        source(one.path, batches)
    with closing(source(one.path, batches, round_robin=False)) as remote:
        assert len(numbers(remote.open(0, 0))) == batches.cardinality()


def feed_of(config: DataConfig, epochs: int = 2, skip: int = 0) -> list[list[list[float]]]:
    """This rank's rows of each step of each epoch."""
    feed = make_feed(shuffled(), world=distributed.current_world(), config=config, training=True)
    with closing(feed):
        return [
            [np.asarray(step.batch[0])[: step.examples].tolist() for step in feed.read(epoch, skip)]
            for epoch in range(epochs)
        ]


def facts_of_unseeded(config: DataConfig) -> dict[str, str]:
    world = distributed.current_world()
    made = make_feed(shuffled_without_seed(world), world=world, config=config, training=True)
    with closing(made):
        return made.fingerprint()


def batches_without(epochs: int = 2) -> list[list[list[float]]]:
    feed = make_feed(shuffled(), world=SingleWorld(), config=DataConfig(), training=True)
    with closing(feed):
        return [[list(map(float, s.batch[0])) for s in feed.read(e)] for e in range(epochs)]


def joined(parts: list[list[list[list[float]]]]) -> list[list[list[float]]]:
    """The ranks' rows of each step, in the order of ranks."""
    return [
        [[*chain(*step)] for step in zip(*epoch, strict=True)] for epoch in zip(*parts, strict=True)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_turns_train_on_the_batches_of_one_process(one, ranks: Group, size):
    config = DataConfig(service=DataServiceConfig(str(one.path)))
    expected = batches_without()
    assert joined(ranks(size).run(feed_of, config)) == expected
    # Two equal runs, and a resume in mid-epoch.
    assert joined(ranks(size).run(feed_of, config)) == expected
    assert joined(ranks(size).run(feed_of, config, 1, skip=3)) == [expected[0][3:]]
    # Rank 0 has one batch left, the others none.
    own = DataConfig(batch="per_worker", service=config.service)
    assert joined(ranks(size).run(feed_of, own, 1, skip=7 // size)) == [expected[0][6:]]


def turns_of(path: str, worker: int) -> list[int]:
    """The first number of this rank's slice of each batch; rank 0 kills the worker in between."""
    world = distributed.current_world()
    config = DataConfig(service=DataServiceConfig(path))
    with closing(make_feed(wide(300), world=world, config=config, training=True)) as feed:
        steps = feed.read(0)
        found = [int(next(steps).batch[0, 0]) for _ in range(20)]
        if world.is_root:
            os.kill(worker, signal.SIGKILL)
        found += [int(step.batch[0, 0]) for step in steps]
    # TensorFlow's reader of the killed worker sleeps longer between attempts, the longer the next
    # worker takes to start; it cannot be woken.
    for thread in threading.enumerate():
        if thread.name == "ktrainer-feed-service":
            thread.join(60)
    return found


@pytest.mark.exhaustive
def test_ranks_in_turns_lose_nothing_with_a_worker(failing, ranks: Group):
    worker = failing.servers("worker")[0].pid
    parts = ranks(2).run(turns_of, str(failing.path), worker, deadline=120)
    for rank, part in enumerate(parts):
        assert part == list(range(2 * rank, 1200, 4))


def test_a_pipeline_that_calls_python_is_refused(one):
    def rows() -> Iterator[int]:
        yield from range(3)

    made = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64))
    mapped = tf.data.Dataset.range(3).map(lambda i: tf.py_function(int, [i], tf.int64))
    found = TfDataServiceConfig.read(one.path)
    for dataset in (made, mapped):
        with pytest.raises(DataError, match="exist in this process only"):
            send_to_data_service(dataset, found, 0, 1)
    config = DataConfig(service=DataServiceConfig(str(one.path)))
    with pytest.raises(DataError, match="exist in this process only"):
        make_feed(made.batch(2), world=SingleWorld(), config=config, training=True)
    with pytest.raises(ConfigError, match=r"not arrays: pass a tf\.data\.Dataset"):
        make_feed(np.zeros((4, 1)), world=SingleWorld(), config=config, training=True)


def test_scripts_send_datasets(one):
    found = TfDataServiceConfig.read(one.path)
    sent = send_to_data_service(tf.data.Dataset.range(10).map(lambda x: 2 * x), found, 0, 1)
    assert sorted(int(x) for x in sent) == list(range(0, 20, 2))
    with pytest.raises(DataError, match=r"send dataset\.repeat\(\)"):
        send_to_data_service(sent, found, 0, 1, reuse_dataset=True, round_robin=True)
    with pytest.raises(ConfigError, match="add reuse_dataset=True"):
        send_to_data_service(sent, found, 0, 1, round_robin=True)
    with data_service(found, 0) as address:
        assert address == f"grpc://{found.addresses[0]}"


def test_horovods_names(one):
    from ktrainer.dataparallel.data.compute_service import TfDataServiceConfig as Theirs

    found = Theirs.read(one.path, wait_for_file_creation=True)
    sent = tf.data.Dataset.range(6).send_to_data_service(found, 0, 1)
    assert sorted(int(x) for x in sent) == list(range(6))


def test_servers_listen_at_the_address_of_the_service_alone(one, within):
    def addresses() -> set[str]:
        servers = [*one.servers("dispatcher"), *one.servers("worker")]
        found = [c for server in servers for c in server.net_connections("inet")]
        listening = [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
        return {address.removeprefix("::ffff:") for address in listening}

    within(30, lambda: addresses() == {"127.0.0.1"}, "one address")


def test_a_worker_that_fails_in_mid_epoch_loses_nothing(failing):
    with closing(source(failing.path, wide(300))) as remote:
        pieces = remote.open(0, 0)
        before = firsts(next(pieces) for _ in range(40))
        failing.kill("worker")
        assert before + firsts(pieces) == list(range(0, 1200, 4))


@pytest.mark.exhaustive
def test_a_dispatcher_that_hangs_is_an_error_within_the_deadline(one):
    """It still has its port, where the system accepts connections."""
    (dispatcher,) = one.servers("dispatcher")
    with closing(source(one.path, wide(300), deadline=3.0)) as remote:
        pieces = remote.open(0, 0)
        before = firsts(next(pieces) for _ in range(5))
        dispatcher.suspend()
        try:
            # The worker needs no dispatcher for the rest of an epoch that has begun.
            assert before + firsts(pieces) == list(range(0, 1200, 4))
            began = time.monotonic()
            with pytest.raises(WorldError, match="has not answered for 3 s"):
                next(remote.open(1, 0))
            assert time.monotonic() - began < 30  # the text says when it was given up
            with pytest.raises(DeadlineExceeded):
                TfDataServiceConfig.read(one.path, True, timeout=1.0)
        finally:
            dispatcher.resume()


def test_numbers_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"5 / 2 = 2\.5 workers each.*-n 4 or -n 6"):
        check_workers(5, 2)
    with pytest.raises(ConfigError, match="3 training processes and 2 dispatchers"):
        check_size(TfDataServiceConfig(2, 1), 3)
    path = tmp_path / "service.json"
    TfDataServiceConfig(1, 4, addresses=("127.0.0.1:1",)).write(path)
    with pytest.raises(ConfigError, match=r"4 workers / 1 dispatchers = 4"):
        source(path, shuffled())
    TfDataServiceConfig(1, 1, "training").write(path)
    with pytest.raises(ConfigError, match="without --dispatcher-side training"):
        source(path, shuffled())


def test_the_file_is_waited_for(tmp_path):
    path = tmp_path / "service.json"
    with pytest.raises(SetupError, match="Start one with `ktrainer data-service"):
        TfDataServiceConfig.read(path)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for the file"):
        TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=0.2)
    stale = TfDataServiceConfig(1, 1, addresses=("127.0.0.1:9",), path=str(path))
    stale.write(path)
    with pytest.raises(DeadlineExceeded, match=r"of a service that has ended, .* 127\.0\.0\.1:9"):
        TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=0.2)
    with pytest.raises(SetupError, match="the service has ended"):
        send_to_data_service(tf.data.Dataset.range(1), replace(stale, timeout=0.2), 0, 1)
    path.write_text("[]")
    with pytest.raises(SetupError, match="is not a file that"):
        TfDataServiceConfig.read(path)
    written = TfDataServiceConfig(2, 3, addresses=("a:1", "b:2"), token="t", timeout=5.0)
    written.write(path)
    assert (
        TfDataServiceConfig.read(path).to_dict()
        == written.to_dict()
        == json.loads(path.read_text())
    )


def test_healing_is_refused():
    words = {"backend": {"name": "data_parallel", "engine": "mpi"}, "world": {"heal": True}}
    with pytest.raises(ConfigError, match=r"contradicts data\.service\.config"):
        load_config({**words, "data": {"service": {"config": "service.json"}}})


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ktrainer.cli.main", "data-service", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_refuses_what_cannot_work(tmp_path):
    told = command("-n", "3", "--dispatchers", "2", "--config", str(tmp_path / "a.json"))
    assert (told.returncode, "3 / 2 = 1.5" in told.stderr) == (2, True)
    told = command("--config", str(tmp_path / "none" / "a.json"))
    assert (told.returncode, "there is no folder" in told.stderr) == (2, True)
    for address in ("no-such-host", "10.9.9.9"):
        told = command("--config", str(tmp_path / "a.json"), "--address", address)
        assert (told.returncode, f"listen at '{address}' here" in told.stderr) == (2, True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    told = command("--config", str(tmp_path / "a.json"), "--work-dir", str(tmp_path / "file" / "b"))
    assert (told.returncode, "cannot be made (Not a directory)" in told.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_resume_in_mid_epoch_of_first_come_first_served(one):
    config = DataConfig(service=DataServiceConfig(str(one.path), round_robin=False))
    feed = make_feed(shuffled(), world=SingleWorld(), config=config, training=True)
    with closing(feed):
        feed.peek(1)  # as `fit` does
        with pytest.raises(CheckpointError, match="leaves no record of which examples"):
            list(feed.read(0, skip=2))


def test_first_come_first_served_has_no_epochs_that_continue(one):
    """Passes differ in length, so that no epoch could begin inside of one."""
    config = DataConfig(service=DataServiceConfig(str(one.path), round_robin=False))
    settings = {"world": SingleWorld(), "config": config, "training": True}
    with pytest.raises(ConfigError, match="leave steps_per_epoch out"):
        make_feed(shuffled(), batches_per_epoch=3, **settings)


def test_a_worker_that_hangs_is_named_and_a_signal_ends_the_wait(one):
    def asked_to_end() -> None:
        if time.monotonic() - began > 2:
            raise InterruptedError

    (worker,), began = one.servers("worker"), time.monotonic()
    with closing(source(one.path, shuffled(), deadline=1.0)) as remote:
        worker.suspend()
        try:
            waits = pytest.warns(UserWarning, match="sent no batch for .* a worker hangs")
            with waits, checked_waits(asked_to_end), pytest.raises(InterruptedError):
                next(remote.open(0, 0))
        finally:
            worker.resume()


def test_no_resume_in_mid_epoch_of_a_shuffle_without_a_seed(one):
    tf.random.set_seed(None)  # type: ignore[arg-type]
    unseeded = tf.data.Dataset.range(40).shuffle(40).batch(8)
    with closing(source(one.path, unseeded)) as remote:
        assert sorted(chain(*numbers(remote.open(0, 0)))) == list(range(40))
        with pytest.raises(CheckpointError, match="shuffles without a seed"):
            next(remote.open(1, 2))
    config = DataConfig(service=DataServiceConfig(str(one.path)))
    feed = make_feed(unseeded, world=SingleWorld(), config=config, training=True)
    with closing(feed):
        feed.peek(1)  # as `fit` does
        with pytest.raises(CheckpointError, match="shuffles without a seed"):
            list(feed.read(0, skip=2))


def test_files_of_others_are_not_overwritten(one, tmp_path):
    def listed(path: Path) -> Path:
        return listed_path(argparse.Namespace(config=str(path), dispatchers=1))

    with pytest.raises(ConfigError, match="service that runs, at 127"):
        listed(one.path)
    path = tmp_path / "train.json"
    path.write_text('{"seed": 1}')
    with pytest.raises(ConfigError, match="exists and is not the file of"):
        listed(path)
    assert path.exists()
    TfDataServiceConfig(1, 1, addresses=("127.0.0.1:9",)).write(path)
    write_json(dispatcher_file(path, 0), "127.0.0.1:9")
    assert listed(path) == path
    assert not list(tmp_path.iterdir())


def test_a_dispatcher_of_a_lost_job_is_not_used(tmp_path):
    """Rank 0 of a job that was killed leaves its file; that of the next job replaces it."""
    path = tmp_path / "service.json"
    found = TfDataServiceConfig(1, 1, "training", timeout=0.3, path=str(path))
    write_json(dispatcher_file(path, 0), "127.0.0.1:9")
    with pytest.raises(SetupError, match="or that of a job that has ended"), data_service(found, 1):
        pass


@pytest.mark.exhaustive
def test_a_service_that_has_ended_is_an_error_within_the_deadline(tmp_path):
    """TensorFlow itself would try to register the pipeline for ever."""
    path = tmp_path / "service.json"
    TfDataServiceConfig(1, 1, addresses=("127.0.0.1:9",)).write(path)
    ending = """
import sys
from tests.data.test_data_service import *
list(source(sys.argv[1], shuffled(), deadline=2.0).open(0, 0))
"""
    (tmp_path / "ending.py").write_text(ending)
    ended = script(tmp_path / "ending.py", path, seconds=60)
    assert "WorldError: the dispatcher of the tf.data service at 127.0.0.1:9" in ended.stderr


@pytest.mark.exhaustive
def test_a_dispatcher_for_each_rank(tmp_path, ranks: Group):
    words = ("-n", "2", "--dispatchers", "2", "--threads", "1")
    with service(tmp_path, *words, python=warm_python()) as started:
        config = DataConfig(service=DataServiceConfig(str(started.path)))
        assert joined(ranks(2).run(feed_of, config)) == batches_without()
        own = DataConfig(shard="element", service=DataServiceConfig(str(started.path)))
        parts = ranks(2).run(feed_of, own)
        assert sorted(chain(*chain(*(part[1] for part in parts)))) == list(range(ROWS))
        one, two = ranks(2).run(facts_of_unseeded, own)  # parts of two orders
        differ = {name for name in one if one[name] != two[name]}
        assert differ == {"first batch/x", "first batch/y"}
    assert started.process.returncode == 0
    assert not started.path.exists()


@pytest.mark.exhaustive
def test_first_come_first_served_reads_each_example_once(tmp_path, ranks: Group):
    with service(tmp_path, "-n", "2", "--threads", "1", python=warm_python()) as started:
        config = DataConfig(service=DataServiceConfig(str(started.path), round_robin=False))
        parts = ranks(2).run(feed_of, config)
        for epoch in range(2):
            assert sorted(chain(*chain(*(part[epoch] for part in parts)))) == list(range(ROWS))
        # Each worker ends with a smaller batch.
        rows = tf.data.Dataset.range(100).apply(sleep(2000)).batch(40)
        feed = make_feed(rows, world=SingleWorld(), config=config, training=True)
        with closing(feed):
            for epoch in range(2):
                found = [int(row) for step in feed.read(epoch) for row in step.batch]
                assert sorted(found) == list(range(100))
        with closing(source(started.path, wide(400), round_robin=False)) as remote:
            pieces = remote.open(0, 0)
            next(pieces)
            started.kill("worker")
            with pytest.raises(WorldError, match="not trained on"):
                list(pieces)


@pytest.mark.exhaustive
def test_the_dispatchers_end_is_an_error_and_with_a_journal_none(tmp_path):
    journal = tmp_path / "journal"
    words = ("--work-dir", str(journal), "--threads", "1")
    with (
        service(tmp_path, *words, python=warm_python()) as started,
        closing(source(started.path, wide(300), deadline=60.0)) as remote,
    ):
        pieces = remote.open(0, 0)
        before = firsts(next(pieces) for _ in range(40))
        started.kill("dispatcher")
        assert before + firsts(pieces) == list(range(0, 1200, 4))
    assert not list(journal.iterdir())  # it names addresses of this service
    ending = """
import sys
from tests.data.test_data_service import *
remote = source(sys.argv[1], wide(300_000))  # more than is sent before the service ends
pieces = remote.open(0, 0)
next(pieces)
import psutil
psutil.Process(int(sys.argv[2])).kill()
for _ in pieces:
    pass
"""
    (tmp_path / "ending.py").write_text(ending)
    with service(tmp_path, "--threads", "1", python=warm_python()) as started:
        dispatcher = started.servers("dispatcher")[0].pid
        ended = script(tmp_path / "ending.py", started.path, dispatcher, seconds=60)
        assert started.process.wait(20) == 128 + 9
    assert "WorldError: the dispatcher of the tf.data service at" in ended.stderr
    assert "dispatcher 0 was ended by signal 9" in started.output


def install_java() -> None:
    """Install a Java runtime where there is none; skip the test where that cannot be done."""
    for line in (
        "apt-get update",
        "apt-get install -y --no-install-recommends default-jre-headless",
    ):
        if shutil.which("java") is not None:
            return
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            pytest.skip("there is no Java runtime: as root, apt-get install default-jre-headless")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(line.split(), capture_output=True, timeout=200, check=False)
    if shutil.which("java") is None:
        pytest.skip("there is no Java runtime, and default-jre-headless could not be installed")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_workers_are_tasks_of_a_spark_job(tmp_path):
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install '.[spark]'")
    install_java()
    program = Path(spark_data_service.__file__)
    words = ["--config", str(tmp_path / "service.json"), "--threads", "1"]
    submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
    with Service.submitted(tmp_path / "service.json", [*submit, str(program), *words]) as started:
        started.wait()
        found = TfDataServiceConfig.read(started.path)
        assert (found.dispatchers, found.workers_per_dispatcher) == (1, 2)
        sent = send_to_data_service(tf.data.Dataset.range(100), found, 0, 1)
        assert sorted(int(x) for x in sent) == list(range(100))
        below = psutil.Process(started.process.pid).children(recursive=True)
        started.process.terminate()
        started.process.wait(30)
        assert not wait_until_ended(below, 30)
        end = time.monotonic() + 15
        while started.path.exists() and time.monotonic() < end:
            time.sleep(0.1)
    assert not started.path.exists()


@pytest.mark.exhaustive
def test_dispatchers_in_the_training_processes(tmp_path):
    words = ("-n", "1", "--dispatcher-side", "training", "--threads", "1")
    training = """
import sys
import tensorflow as tf
from ktrainer.data import TfDataServiceConfig, data_service

config = TfDataServiceConfig.read(sys.argv[1])
for times in (2, 3):  # the workers follow a second dispatcher too
    with data_service(config, 0) as address:
        data = tf.data.Dataset.range(50).map(lambda x: x * times)
        distribute = tf.data.experimental.service.distribute("distributed_epoch", address)
        print(sum(int(x) for x in data.apply(distribute)))
"""
    (tmp_path / "training.py").write_text(training)
    with service(tmp_path, *words, python=warm_python()) as started:
        ended = script(tmp_path / "training.py", started.path, seconds=120)
    assert ended.stdout.split() == ["2450", "3675"], ended.stderr
