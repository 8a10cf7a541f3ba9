"""The configuration on the command line of a launch, checked before anything starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec

from ktrainer.config import Config, load_config, parse_known_cli
from ktrainer.config.backend_keys import BACKENDS
from ktrainer.config.launch_environment import as_launched
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import make_plan
from ktrainer.plan_report.planning_mode import pretend
from ktrainer.runtime.hardware import Hardware, available_cpus


def checked_config(
    words: Sequence[str], ranks: int, workers: int | None, requested: Mapping[str, str]
) -> Config | None:
    """The configuration of `words`, checked together with the `requested` environment of ranks;
    None when they hold none."""
    path, overrides, _ = parse_known_cli(words)
    if path is None and not overrides:
        return None
    # If they name no backend, the script may choose one in its code, and checks keys of the
    # backend itself.
    named = any(word.partition("=")[0] in ("backend", "backend.name") for word in overrides)
    if path is None and not named:
        overrides = [word for word in overrides if not _of_some_backend(word)]
    # The script, which registers its callbacks, does not run here.
    config = load_config(path, overrides, on_unknown_callback=lambda _error: None)
    if named or config.backend.name != "local":
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
    return config


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
        )


def _of_some_backend(word: str) -> bool:
    """Return whether `word` sets a key of one of the backends."""
    group, _, key = word.partition("=")[0].partition(".")
    known = {field.name for backend in BACKENDS.values() for field in fields(backend)}
    return group == "backend" and key.partition(".")[0] in known


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide words into ktrainer's and the script's."""
    path, overrides, own = parse_known_cli(words)
    return [*overrides, *([] if path is None else [f"--config={path}"])], own
