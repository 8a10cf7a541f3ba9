"""How Sphinx builds this site: `make docs`. Some pages are generated from the code itself."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import ktrainer  # noqa: E402

project = "ktrainer"
author = "the ktrainer authors"
release = ktrainer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = "ktrainer"
html_show_sourcelink = False
html_theme_options = {"source_directory": "docs/"}

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
# `console` is a session: prompts and output.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "separated"
napoleon_google_docstring = True

SCHEDULES = {  # picture -> how `ktrainer plan` is told to draw it
    "gpipe": ["backend.schedule=gpipe"],
    "1f1b": ["backend.schedule=1f1b"],
    "zero_bubble": ["backend.schedule=zero_bubble"],
    "interleaved": ["backend.schedule=interleaved", "backend.chunks=2"],
}


def write_configuration(folder: Path) -> None:
    """Write the reference of all configuration keys, from the schema's docstrings."""
    from ktrainer.config.key_reference import reference_markdown

    (folder / "configuration.md").write_text(reference_markdown())


def write_cli(folder: Path) -> None:
    """Write the help of every command."""
    from ktrainer.cli import main

    lines = [
        "# Command line",
        "",
        "The help of each command, as `ktrainer COMMAND --help` prints it.",
    ]
    commands = [name for name in main.COMMANDS if name != "launch"]
    actions = [f"checkpoint {name}" for name in ("list", "show", "verify", "export", "import")]
    at = commands.index("checkpoint") + 1
    for name in [*commands[:at], *actions, *commands[at:]]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main.main([*name.split(), "--help"])
        level = "###" if name in actions else "##"
        lines += ["", f"{level} `ktrainer {name}`", "", "```text", text.getvalue().rstrip(), "```"]
    lines.insert(3, "\n`ktrainer launch` is another name for `ktrainer run`.")
    (folder / "cli.md").write_text("\n".join(lines) + "\n")


def draw_schedules(folder: Path) -> None:
    """Draw the pictures of pipeline schedules: four ranks, eight microbatches."""
    from ktrainer.cli import main

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "four_ranks.yaml"
    config.write_text("backend: {name: pipeline, partitions: 4, microbatches: 8}\n")
    for name, words in SCHEDULES.items():
        picture = ["--picture", str(folder / f"{name}.svg")]
        with contextlib.redirect_stdout(io.StringIO()):
            status = main.main(["plan", *picture, str(config), *words])
        assert status == 0, f"ktrainer plan ended with {status}"


def docstring_to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn the Markdown of our docstrings (fences, single backticks) into reStructuredText."""
    text = "\n".join(lines)
    text = re.sub(
        r"```(\w+)\n(.*?)\n```",
        lambda m: f".. code-block:: {m[1]}\n\n" + re.sub(r"(?m)^(?=.)", "    ", m[2]) + "\n",
        text,
        flags=re.DOTALL,
    )
    lines[:] = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", text).splitlines()


def setup(app) -> None:
    write_configuration(DOCS / "reference")
    write_cli(DOCS / "reference")
    draw_schedules(DOCS / "images" / "schedules")
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", docstring_to_rst, priority=400)
