"""Configuration: a schema of dataclasses, and the strict merge schema < YAML < command line.

The parts of this package:

    schema.py      every key, its type, default and meaning
    backends.py    the keys of each backend
    bounds.py      bounds, declared beside the defaults
    schematree.py  facts about the schema, and which name is meant by a wrong one

    load.py        the merge
    precedence.py  where keys were set, and which of them a call's arguments may change
    sources.py     its layers: a file, a dict, words `key=value`
    argv.py        the command line of a script
    launched.py    what `ktrainer launch` tells the ranks
    cluster.py     what TF_CONFIG or Slurm's variables say
    strict.py      refuses what the schema does not know
    check.py       refuses what types cannot: bounds, durations, contradictions
    pipeline.py, strategies.py, healing.py, health.py   the contradictions of one area each

    docs.py        the reference, and a configuration as commented YAML
    command.py     `ktrainer config`
    compare.py     where two configurations differ
    redact.py      keeps secrets out of what is shown
"""

from ktrainer.config.argv import parse_cli, parse_known_cli
from ktrainer.config.backends import (
    BACKENDS,
    BackendConfig,
    DataParallelConfig,
    LocalConfig,
    PipelineConfig,
    TfDistributeConfig,
)
from ktrainer.config.compare import config_diff
from ktrainer.config.docs import describe, resolved_yaml
from ktrainer.config.load import load_config
from ktrainer.config.redact import redact
from ktrainer.config.schema import (
    CheckpointConfig,
    ClipConfig,
    Config,
    DataConfig,
    HealthConfig,
    InterruptConfig,
    LoggingConfig,
    LrConfig,
    LrPhase,
    RunConfig,
    TrainerConfig,
    WorldConfig,
)

__all__ = [
    "BACKENDS",
    "BackendConfig",
    "CheckpointConfig",
    "ClipConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "HealthConfig",
    "InterruptConfig",
    "LocalConfig",
    "LoggingConfig",
    "LrConfig",
    "LrPhase",
    "PipelineConfig",
    "RunConfig",
    "TfDistributeConfig",
    "TrainerConfig",
    "WorldConfig",
    "config_diff",
    "describe",
    "load_config",
    "parse_cli",
    "parse_known_cli",
    "redact",
    "resolved_yaml",
]
