"""Configuration: a schema of dataclasses, merged strictly: schema < script < YAML < command line.

schema.py, schema_fields.py, backend_keys.py  every key: type, default, bounds, meaning
config_loading.py, config_sources.py          merge the layers; command_line.py: `key=value`
value_checks.py, pipeline_checks.py, strategy_checks.py, fault_tolerance_checks.py
                                               incompatible keys
key_errors.py                                  errors, with the nearest key and what to do
key_reference.py, redact.py                    a configuration as text, without its secrets
callback_registry.py, name_patterns.py         callbacks by name; layers by patterns
script_parameters.py                           parameters of the script's own
data_service_file.py                           where the processes of a tf.data service are
launch_environment.py, cluster_environment.py  what the launcher, TF_CONFIG or Slurm has set
"""

from ktrainer.config.backend_keys import (
    BACKENDS,
    BackendConfig,
    DataParallelConfig,
    LocalConfig,
    PipelineConfig,
    TfDistributeConfig,
)
from ktrainer.config.command_line import parse_cli, parse_known_cli
from ktrainer.config.config_loading import load_config
from ktrainer.config.key_reference import config_diff, describe, resolved_yaml
from ktrainer.config.redact import redact
from ktrainer.config.schema import (
    CheckpointConfig,
    ClipConfig,
    Config,
    DataConfig,
    DataServiceConfig,
    HealthConfig,
    InterruptConfig,
    LoggingConfig,
    LrConfig,
    LrPhase,
    ProfileConfig,
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
    "DataServiceConfig",
    "HealthConfig",
    "InterruptConfig",
    "LocalConfig",
    "LoggingConfig",
    "LrConfig",
    "LrPhase",
    "PipelineConfig",
    "ProfileConfig",
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
