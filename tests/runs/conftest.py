"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.browser import Browser, browser, why_no_browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (why := why_no_browser()) is not None:
        pytest.skip(why)
    with browser(tmp_path_factory.mktemp("profile")) as it:
        yield it
