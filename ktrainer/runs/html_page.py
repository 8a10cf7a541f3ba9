"""One HTML file that loads nothing and sends nothing, around the contents of a page.

Its security policy allows no other script or style than its own, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><div><h1>{title}</h1><p class="quiet">{made}</p></div>
<button id="theme" type="button" hidden>Theme: system</button></header>
<main>
{body}
</main>
<footer class="quiet">Made by ktrainer {version}. This file loads nothing from elsewhere.</footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def html_page(title: str, body: str, data: Any, scripts: Sequence[str], version: str) -> str:
    """The page.

    Args:
        title, body: as HTML.
        data: JSON-able, for the scripts, in the element `data`.
        scripts: files of this folder, in order.
        version: of ktrainer.
    """
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in scripts)
    page = _PAGE.format(
        policy=_policy(style, script),
        title=title,
        style=style,
        made=time.strftime("Report of %F %T"),
        body=body,
        version=escape(version),
        data=embedded(data),
        script=script,
    )
    return page.encode(errors="replace").decode()


def embedded(data: Any) -> str:
    """JSON that can stand in a `script` element: no text in it can end that, or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(style: str, script: str) -> str:
    """The policy by which a browser runs this page's own script and style alone."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
