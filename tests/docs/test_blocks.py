"""The comparison of what a page quotes with what was printed, and the check of commands."""

from __future__ import annotations

from subprocess import CalledProcessError

import pytest

from ktrainer.errors import ConfigError
from tests.docs.blocks import difference, read_blocks
from tests.docs.commands import check_command

PRINTED = "start\nepoch 1/2  loss 2.01\nepoch 2/2  loss 1.50  [0.1s]\nend\n"


@pytest.mark.parametrize(
    "quoted",
    [
        PRINTED,
        "...\nepoch 2/2  loss 1.51  [...]\nend",
        "start\n...",
        "...\nepoch 1/2 loss 2.00\n...\nend",
    ],
)
def test_what_is_quoted_is_found(quoted):
    assert difference(quoted, PRINTED) is None


@pytest.mark.parametrize(
    "quoted",
    [
        "start",
        "...\nepoch 2/2  loss 1.60  [...]\nend",  # another number
        "...\nepoch 3/2  loss 1.50  [...]\nend",  # whole numbers are exact
        "...\nend\nepoch 2/2 ...",  # another order
        "start\nepoch 2/2 ...\nend",  # a line is left out
    ],
)
def test_what_is_not_there_is_told(quoted):
    assert difference(quoted, PRINTED).endswith(PRINTED.strip())


def test_marks_belong_to_the_next_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.py -->\n<!-- status: 2 -->\n```python\n1\n```\n\n"
        "```console\n$ a \\\n  b\nc\n```\n"
        "<!-- not run: why -->\nSome text.\n````text\n```\n````\n"
    )
    first, second, third = read_blocks(page)
    assert (first.marks, first.text) == ({"file": "a.py", "status": "2"}, "1\n")
    assert list(second.commands()) == [("a   b", "c")]
    assert (third.language, third.text, third.marks) == ("text", "```\n", {})


@pytest.mark.parametrize(
    "command",
    [
        "ktrainer run --hael -n 2 train.py",
        "ktrainer launhc -n 2 train.py",
        "ktrainer run -n 2 train.py backend=data_paralel",
        "mpirun -np 2 python train.py trainer.epoch=3",
        "python benchmarks/none.py",
        "make tset",
        'pip install ".[cpuu]"',
        "frobnicate",
        "echo 'open",
    ],
)
def test_commands_that_cannot_work_are_refused(command):
    with pytest.raises((AssertionError, ConfigError, SystemExit, CalledProcessError)):
        check_command(command)
