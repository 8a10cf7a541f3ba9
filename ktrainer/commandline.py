"""The words of `ktrainer run` that belong to ktrainer, kept in the process that runs the script.

They are neither in the script's `sys.argv`, which holds its own words alone, nor in an environment
variable, which its children would inherit. Imports only the standard library: the launcher's
worker sets `words` before the script begins.
"""

from __future__ import annotations

words: list[str] = []  # `key=value` and `--config FILE`
