"""Which scripts are plain."""

from __future__ import annotations

import pytest

from ktrainer.script.plain_script import imports_package, is_plain


@pytest.mark.parametrize(
    "source",
    [
        "import keras",
        "",
        "from ktrainer import rank_zero_only, Callback\nimport keras",
        "import ktrainer\n@ktrainer.rank_zero_only\ndef save(): ...",
        "# from ktrainer import Trainer",
        "from my import Trainer\nTrainer()",
        "from ktrainer import *\nbarrier()",
        "from ktrainer import *\nsteps = config = 3\nprint(steps, config)",
        "from ktrainer import KtrainerError, partition",
        "from ktrainer.callbacks import StopAt",
        "import ktrainer.distributed",
    ],
)
def test_plain(source: str) -> None:
    assert is_plain(source.encode())


@pytest.mark.parametrize(
    "source",
    [
        "from ktrainer import Trainer",
        "import ktrainer as kt\nkt.Trainer()",
        "from ktrainer.trainer import Trainer",
        "from ktrainer.config import load_config",
        "from ktrainer.steps import Program",
        "import ktrainer.dataparallel as hvd",
        "from ktrainer import dataparallel as sdp",
        "from ktrainer.dataparallel import init",
        "import ktrainer.modelparallel as smp",
        "from ktrainer import *\nTrainer()",
        "import ktrainer.trainer",
        "def main():\n    import ktrainer\n    return ktrainer.Trainer",
        "x = (",
    ],
)
def test_not_plain(source: str) -> None:
    assert not is_plain(source.encode())


def test_imports() -> None:
    assert imports_package(b"import os\nimport horovod.tensorflow.keras as hvd", "horovod")
    assert imports_package(b"from horovod.keras import callbacks", "horovod")
    assert not imports_package(b"import keras", "horovod")
