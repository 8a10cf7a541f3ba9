"""Ranks on a GPU and on the CPU beside it, and a file of what was seen.

    make test-gpu                                        a GPU is required
    python -m pytest -m gpu tests/gpu                    without one, all is skipped
    python -m pytest -m gpu tests/gpu --gpu-device=cpu   the CPU in its place: one case of each

All of TensorFlow runs in ranks of their own: this process never sees a GPU, which its own tests
would share and fill.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.running import Outcome
from tests.dist.harness import Pool, Ranks
from tests.dist.harness.group import ROOT
from tests.gpu.device import CPU, Device, chosen_device, log_without_gpu, why_no_gpu
from tests.gpu.results import Results
from tests.gpu.training import start, zoo

START_SECONDS = 300.0  # a driver may compile TensorFlow's kernels for the GPU first
_results = pytest.StashKey[Results]()
_truth: dict[str, Outcome] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU tests")
    group.addoption(
        "--gpu-device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto: skip without a GPU; gpu: fail without one; cpu: the CPU takes its place",
    )
    group.addoption(
        "--gpu-results", type=Path, help="folder for results.json and results.md; default build/gpu"
    )


@pytest.hookimpl(trylast=True)  # once pytest has selected by name and marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip all tests where there is no GPU; try one case of each where the CPU takes its place."""
    if _asked(config) == "cpu":
        _keep_first_cases(config, items)
    reason = None if _asked(config) != "auto" else why_no_gpu()
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(600))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """More cases of the CPU beside the CPU show nothing of a GPU."""
    seen: set[str] = set()
    deselected = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("gpu") and test in seen:
            deselected.append(item)
        seen.add(test)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    results = item.config.stash.get(_results, None)
    if results is not None and (report.when == "call" or report.failed):
        results.ended(item.name, report.outcome, report.duration, report.longreprtext)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash.get(_results, None)
    if results is not None:
        terminalreporter.section("seen on the device")
        terminalreporter.write_line(results.as_markdown())


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = request.config.getoption("gpu_results", None)
    if folder is None:
        # Files side by side, as `make test` runs them, would overwrite each other's results.
        own = _asked(request.config) != "cpu" and "PYTEST_XDIST_WORKER" not in os.environ
        folder = ROOT / "build" / "gpu" if own else tmp_path_factory.mktemp("gpu")
    results = request.config.stash[_results] = Results(folder)
    return results


@pytest.fixture(scope="session")
def device(pool: Pool, results: Results, request: pytest.FixtureRequest) -> Device:
    """The device that is tested, which TensorFlow has found."""
    device = chosen_device(_asked(request.config))
    found = _started(_group(pool.ranks, 1, device))[0]
    results.describe({"device": device.kind, **found})
    if device.kind == "GPU" and not found["gpus"]:
        reason = f"no GPU: TensorFlow finds none. Its log:\n{log_without_gpu(device)}"
        pytest.skip(reason) if _asked(request.config) == "auto" else pytest.fail(reason, False)
    return device


@pytest.fixture
def on_device(ranks: Callable[..., Ranks], device: Device) -> Callable[[int], Ranks]:
    """`on_device(2)` are two ranks that share the device."""

    def group(size: int = 1) -> Ranks:
        found = _group(ranks, size, device)
        if not found._tasks:  # also one that replaces a group that was lost
            _started(found)
        return found

    return group


@pytest.fixture
def models(device: Device) -> Callable[..., tuple[str, ...]]:
    """`models("mlp", "vae")` are those names; where the CPU takes the GPU's place, the first."""
    return lambda *names: names if device.is_gpu else names[:1]


@pytest.fixture
def on_cpu(ranks: Callable[..., Ranks], device: Device) -> Ranks:
    """One rank that sees no GPU."""
    return ranks(1, "cpu", env=CPU.environment) if device.is_gpu else _group(ranks, 1, device)


@pytest.fixture
def truth(on_cpu: Ranks) -> Callable[..., dict[str, Outcome]]:
    """`truth("mlp", "vae")` is what the CPU makes of these models of the zoo, each trained once."""

    def trained(*names: str) -> dict[str, Outcome]:
        missing = [name for name in names if name not in _truth]
        if missing:
            _truth.update(on_cpu.run(zoo, missing, deadline=240)[0])
        return {name: _truth[name] for name in names}

    return trained


@pytest.fixture
def seen(request: pytest.FixtureRequest, results: Results) -> Callable[..., None]:
    """`seen(difference=1e-12)` writes down what a test has measured, before it is judged."""
    return lambda **facts: results.add(request.node.name, facts)


def _asked(config: pytest.Config) -> str:
    # The option is unknown where pytest was not given this folder.
    return str(config.getoption("gpu_device", "auto"))


def _group(ranks: Callable[..., Ranks], size: int, device: Device) -> Ranks:
    """Ranks on the device; those of other tests where no GPU is hidden or chosen for them."""
    if not device.environment:
        return ranks(size)
    return ranks(size, "device", env=device.environment)


def _started(group: Ranks) -> list[dict[str, Any]]:
    """Start TensorFlow on the ranks, once; what each of them is."""
    group.outcomes(start, deadline=START_SECONDS)  # CUDA may open files that stay open
    return group.run(start)
