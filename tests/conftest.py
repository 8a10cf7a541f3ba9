"""Fixtures for all tests: groups of real ranks, leak checks, a clean Keras, real data.

The variables below must be set before TensorFlow is first imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ktrainer.launch.orphan_prevention import adopt_orphans
from tests.dist.harness import Pool, Ranks, keras_state, leaks
from tests.dist.harness.group import ROOT, one_thread
from tests.dist.harness.hosts import Hosts, why_no_hosts
from tests.processes import end_warm_python

os.environ.update(one_thread())
adopt_orphans()
# A shell that runs the tests in the background has them, and all they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# An example that a busy machine pauses is not one that fails.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs Horovod where it is not built; leave cases of `quick` tests to test-all."""
    horovod = find_spec("horovod") is not None
    cases: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("horovod") and not horovod:
            item.add_marker(pytest.mark.skip(reason="Horovod is not built: make horovod"))
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item.callspec.id)
    for item in items:
        test, quick = item.nodeid.partition("[")[0], item.get_closest_marker("quick")
        if not (quick and isinstance(item, pytest.Function)):
            continue
        chosen = quick.args or cases[test][:1]
        unknown = {*chosen} - {*cases[test]}
        if unknown and len(cases[test]) > 1:  # else a single case was asked for
            raise pytest.UsageError(f"{test}: mark.quick names no case {sorted(unknown)}")
        if item.callspec.id not in chosen:
            item.add_marker(pytest.mark.exhaustive)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: the summary may be an hour away."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", flush=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The groups of this session; fails the session when a rank outlives it."""
    pool = Pool()
    yield pool
    left = pool.close()
    assert not left, f"ranks still run after the pool was closed: {left}"


@pytest.fixture(scope="session", autouse=True)
def warm_python() -> Iterator[None]:
    """The process that ranks of launches are forks of ends with the session."""
    yield
    end_warm_python()


@pytest.fixture(scope="module")
def clusters(pool: Pool) -> Iterator[None]:
    """Groups of a tf.distribute cluster end with the file whose tests share them."""
    yield
    pool.end_clusters()


@pytest.fixture
def ranks(pool: Pool, clusters: None) -> Iterator[Callable[..., Ranks]]:
    """`ranks(3)` is a group of three real MPI processes: `ranks(3).run(function, *args)`."""
    yield pool.ranks
    pool.pause()


@pytest.fixture
def hosts() -> Iterator[Callable[[int], Hosts]]:
    """`hosts(2)` is two hosts of their own network; skips where there can be none."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Hosts:
            made = Hosts(count)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, processes, ports, files or variables behind."""
    before = leaks.take()
    yield
    found = leaks.wait_for_none(before)
    assert not found, "left behind by this test:\n  " + "\n  ".join(found)


@pytest.fixture(autouse=True)
def clean_keras(no_leaks: None) -> Iterator[None]:
    """Bring Keras back to its defaults after each test."""
    yield
    keras_state.reset()


@pytest.fixture(autouse=True)
def own_folder(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in a folder of its own, where run folders go by default."""
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """The folder with real data (`mnist/`, `tinyshakespeare/`), or None where there is none.

    `KTRAINER_DATA`, else `shared/data` beside the checkout. Tests make their own data without it.
    """
    for folder in (os.environ.get("KTRAINER_DATA"), ROOT.parent / "shared" / "data"):
        if folder and (path := Path(folder)).is_dir():
            return path
    return None


@pytest.fixture
def within() -> Callable[..., None]:
    """`within(5, condition)` waits until `condition()` is true, and fails after 5 seconds."""

    def wait(seconds: float, condition: Callable[[], object], what: str = "condition") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} not true within {seconds:g} s"
            time.sleep(0.02)

    return wait
