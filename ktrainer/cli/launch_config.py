"""The configuration on the command line of a launch, checked before anything starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ktrainer.config import Config, load_config, parse_known_cli
from ktrainer.config.launch_environment import as_launched
from ktrainer.config.value_checks import script_may_settle
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import make_plan
from ktrainer.plan_report.planning_mode import pretend
from ktrainer.runtime.hardware import Hardware, available_cpus
from ktrainer.script.plain_script import is_plain
from ktrainer.verify.verify_mode import configure_for_verify


def checked_config(
    script: str,
    words: Sequence[str],
    ranks: int,
    workers: int | None,
    requested: Mapping[str, str],
) -> Config | None:
    """The configuration of the `words` after `script`, checked together with the `requested`
    environment of ranks; None when they hold none. What defaults of the script may settle is left
    to the ranks, which know them."""
    path, overrides, _ = parse_known_cli(words)
    if path is None and not overrides:
        return None
    config = configure_for_verify(load_launch_config(script, path, overrides))
    if config.origin("backend.name") is None:
        return config
    try:
        _check_processes(config, ranks, workers, requested)
    except ConfigError as error:
        if _is_plain(script) or not script_may_settle(error, config):
            raise
    return config


def load_launch_config(script: str, path: str | None, overrides: Sequence[str]) -> Config:
    """The configuration on the command line of a script, without the script's own defaults."""
    if _is_plain(script):  # it may register callbacks, but has no defaults
        return load_config(path, overrides, on_unknown_callback=lambda _error: None)
    return load_config(path, overrides, before_script=True)


def _is_plain(script: str) -> bool:
    try:
        return is_plain(Path(script).read_bytes())
    except OSError:  # the launch reports it
        return False


def _check_processes(
    config: Config, ranks: int, workers: int | None, requested: Mapping[str, str]
) -> None:
    """Refuse a configuration that cannot run in so many processes."""
    cores = len(available_cpus()) or os.cpu_count() or 1
    size = ranks if workers is None else 1
    horovod = find_spec("horovod") is not None
    # Whether Horovod has NCCL is known to the ranks, which check it on their hosts.
    facts = Hardware(
        *(size, size, cores),
        horovod=horovod,
        horovod_nccl=horovod,
        world="mpi",
        workers=workers,
    )
    make_plan(as_launched(config, requested), pretend(config, facts))
    _check_cluster(config, workers)


@contextlib.contextmanager
def naming_the_separator(words: Sequence[str]) -> Iterator[None]:
    """Name `--` in errors about unknown keys, which may be arguments of the script."""
    try:
        yield
    except ConfigError as error:
        if "unknown key" in str(error) and "--" not in words:
            error.args = (f"{error} Arguments of the script's own that hold a = go after --.",)
        raise


def _check_cluster(config: Config, workers: int | None) -> None:
    """Refuse `--workers` for other strategies than parameter_server."""
    strategy = getattr(config.backend, "strategy", None)
    if workers is not None and strategy != "parameter_server":
        raise ConfigError(
            "--workers and --servers are for backend.strategy=parameter_server; give -n instead",
            path="backend.strategy" if strategy else "backend",
            value=strategy or config.backend.name,
            needs=["backend.strategy"] if strategy else [],
        )


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide words into ktrainer's and the script's."""
    path, overrides, own = parse_known_cli(words)
    return [*overrides, *([] if path is None else [f"--config={path}"])], own
