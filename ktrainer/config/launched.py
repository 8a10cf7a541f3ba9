"""What `ktrainer launch` was told on its command line and every rank must know.

It goes through the environment: a script need not take words `key=value` to be launched so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktrainer.config.healing import check_healing
from ktrainer.config.schema import Config

VARIABLE = "KTRAINER_WORLD"
SPARE = 64  # processes that may join one launch, in all: each has pipes of its own


def as_launched(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """`config` with the launcher's word on its `world` section.

    Raises:
        ConfigError: the two do not go together.
    """
    told = environ.get(VARIABLE)
    if not told:
        return config
    config = replace(config, world=replace(config.world, **json.loads(told)))
    check_healing(config)
    return config


def to_environment(world: Mapping[str, Any]) -> dict[str, str]:
    """The environment from which ranks learn these keys of the `world` section."""
    return {VARIABLE: json.dumps(dict(world))} if world else {}
