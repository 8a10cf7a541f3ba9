"""Configuration: a schema of dataclasses, and the strict merge schema < YAML < command line."""

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
