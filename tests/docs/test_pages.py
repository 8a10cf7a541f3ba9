"""Every code block and console session of the README and the docs runs as it is shown.

`make test` runs the README; `make test-all` runs every page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import ktrainer
from ktrainer.config import load_config
from tests.docs.blocks import Block, difference, read_blocks
from tests.docs.commands import check_command
from tests.processes import script, warm_python

if TYPE_CHECKING:
    from tests.dist.harness import Ranks

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
GENERATED = {REFERENCE / "cli.md", REFERENCE / "configuration.md"}  # by docs/conf.py
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page not in GENERATED]
KNOWN = {"", "console", "output", "python", "text", "yaml", "make"}
SECONDS = 120
BUILD = "import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"

_namespaces: dict[str, dict[str, Any]] = {}


def run_python(page: str, folder: str, code: str, line: int) -> str:
    """Run a block in this process, in the namespace of its page; returns what it printed."""
    namespace = _namespaces.setdefault(page, {"__name__": "__main__"})
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            # Lines of the page, for tracebacks.
            exec(compile("\n" * line + code, page, "exec"), namespace)
    finally:
        os.chdir(before)
    return printed.getvalue()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def marked(page: Path) -> Any:
    """A page as a test's parameter; guides that start processes are for `make test-all`."""
    starts = any(block.language == "console" and runs(block) for block in read_blocks(page))
    guide = starts and page.parent.name == "guides"
    return pytest.param(page, id=name(page), marks=pytest.mark.exhaustive if guide else ())


def runs(block: Block) -> bool:
    return block.language in ("console", "python") and "not run" not in block.marks


@pytest.fixture
def folder(page: Path, tmp_path: Path) -> Path:
    """Where a page runs: the repository's scripts, and commands `python` and `ktrainer` that start
    as forks of a process with TensorFlow."""
    for each in ("benchmarks", "configs", "examples"):
        (tmp_path / each).symlink_to(ROOT / each)
    commands, program = tmp_path / ".bin", warm_python()
    commands.mkdir()
    (commands / "env.py").write_text("from ktrainer.cli.main import main; main(['env'])")
    for command, special, run in (
        (
            "python",
            f'-c) printf "%s\\n" "$2" > {commands}/text.py; set -- {commands}/text.py',
            program,
        ),
        ("ktrainer", f"env) exec {program} {commands}/env.py", f"{program} -m ktrainer.cli.main"),
    ):
        lines = f'#!/bin/sh\ncase "$1" in {special} ;; esac\nexec {run} "$@"\n'
        (commands / command).write_text(lines)
        (commands / command).chmod(0o755)
    return tmp_path


def own_commands(command: str, page: Path, folder: Path) -> Path:
    """The folder of `ktrainer` and `python` for a command: those of `folder`, but for the README's
    start of several ranks, which is that of a user."""
    as_installed = page.name == "README.md" and " -n " in command
    return Path(sys.executable).parent if as_installed else folder / ".bin"


def run_console(block: Block, folder: Path) -> None:
    """Run the commands of a session, and compare what they print."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for command, expected in block.commands():
        own = own_commands(command, block.page, folder)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**env, "PATH": f"{own}:{env['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        where = f"{block.where}: {command}"
        assert done.returncode == int(block.marks.get("status", 0)), f"{where}\n{done.stdout}"
        wrong = difference(expected, done.stdout) if expected.strip() else None
        assert wrong is None, f"{where}\n{wrong}"


@pytest.mark.quick("README.md")
@pytest.mark.parametrize("page", [marked(p) for p in PAGES if any(map(runs, read_blocks(p)))])
def test_page(page: Path, folder: Path, ranks: Callable[..., Ranks]) -> None:
    blocks = read_blocks(page)
    for block, after in pairwise([*blocks, Block(page, 0, "", "")]):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.text)
        elif not runs(block):
            continue
        elif block.language == "console":
            run_console(block, folder)
        else:
            task = (str(page), str(folder), block.text, block.line)
            (printed,) = ranks(1).run(run_python, *task, deadline=SECONDS)
            wrong = difference(after.text, printed) if after.language == "output" else None
            assert wrong is None, f"{block.where}\n{wrong}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_does_not_run_is_well_formed(page: Path) -> None:
    for block in read_blocks(page):
        assert block.language in KNOWN or block.language.startswith("{"), block.where
        if block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "console" and "not run" in block.marks:
            for command, _ in block.commands():
                check_command(command)
        elif block.language == "yaml" and "not run" not in block.marks:
            load_config(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    """Files and folders of the repository that a page names."""
    quoted = re.findall(
        r"`((?:ktrainer|tests|examples|benchmarks|configs|docs)/[\w/.-]*)`", page.read_text()
    )
    assert [path for path in quoted if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = (page.parent / path) if path else page
        if target.resolve() in GENERATED:
            continue
        if not target.exists() or (heading and heading not in slugs(target)):
            broken.append(link)
    assert broken == []


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_reference_has_all_public_names() -> None:
    text = (REFERENCE / "api.md").read_text() + (REFERENCE / "errors.md").read_text()
    names = {name for name in ktrainer.__all__ if not name.startswith("__")}
    assert {name for name in names if f":: ktrainer.{name}\n" not in text} == set()


def test_the_command_line_has_all_actions_of_checkpoint(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        runpy.run_path(str(ROOT / "docs" / "conf.py"))["write_cli"](tmp_path)
    text = (tmp_path / "cli.md").read_text()
    titles = re.findall(r"^### `ktrainer checkpoint (\w+)`$", text, re.MULTILINE)
    summary = text.split("usage: ktrainer checkpoint [-h] ACTION")[1].split("###")[0]
    assert titles == re.findall(r"^    (\w+) ", summary, re.MULTILINE)
    assert "import" in titles


def test_the_order_of_events_has_all_events() -> None:
    from ktrainer.callbacks.base import EXTRA_EVENTS

    page = (ROOT / "docs" / "concepts" / "order_of_events.md").read_text()
    options = re.search(r":start-after: (.*)\n:end-before: (.*)\n", page)
    assert options is not None
    source = (ROOT / "ktrainer" / "training" / "loop.py").read_text()
    text = source.split(options[1])[1].split(options[2])[0]
    assert [event for event in EXTRA_EVENTS if event not in text] == []


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.exhaustive
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra `docs`: pip install '.[docs]'")
    pytest.importorskip("furo", reason="needs the extra `docs`: pip install '.[docs]'")
    program, site = tmp_path / "build.py", tmp_path / "site"
    program.write_text(BUILD)
    done = script(program, "-W", "--keep-going", "-q", "-b", "html", "docs", site, seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "reference" / "api.html").is_file()
