"""Lines of several ranks are merged whole."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from ktrainer.launch import heal_option
from ktrainer.launch.rank_group import RankGroup
from ktrainer.launch.rank_output import LineMerger


def test_lines_are_whole_and_prefixed() -> None:
    stream = io.BytesIO()
    merger = LineMerger(stream, 11)
    merger.feed(0, b"be")
    merger.feed(10, b"other\n")
    merger.feed(0, b"gin\nend")
    merger.finish()
    assert stream.getvalue() == b"[10] other\n[ 0] begin\n[ 0] end\n"


def test_line_beside_a_display_wipes_the_line_under_the_cursor() -> None:
    stream = io.BytesIO()
    merger = LineMerger(stream, 2, beside_display=True)
    merger.feed(1, b"one\ntwo\n")
    assert stream.getvalue() == b"\r\x1b[2K[1] one\n\r\x1b[2K[1] two\n"


def test_lines_that_contain_noise_are_dropped_with_the_empty_ones_after_them() -> None:
    stream = io.BytesIO()
    merger = LineMerger(stream, 1, prefix=False, drop=heal_option.NOISE)
    merger.feed(0, b"one\n[host:1] OPAL ERROR: Not supported in file ompi/dpm/dpm.c at line 9\n\n")
    merger.feed(0, b"\ntwo\n\nthree\n")
    assert stream.getvalue() == b"one\ntwo\n\nthree\n"


def test_after_a_restart_rank_0_is_shown_again() -> None:
    """A group that heals shows another when rank 0 is lost."""
    streams = io.BytesIO(), io.BytesIO()
    out, err = LineMerger(streams[0], 2, only=0), LineMerger(streams[1], 2)
    for start in (b"first", b"second"):
        RankGroup(1, out, err, grace=1.0, signals=[], joining=1)
        for rank in (1, 0, 1):
            out.feed(rank, b"%b, before\n" % start)
        out.only = 1  # rank 0 has ended
        out.feed(1, b"%b, after\n" % start)
    out.release([1])
    shown = [b"[0] %b, before\n[1] %b, after\n" % (start, start) for start in (b"first", b"second")]
    assert streams[0].getvalue() == b"".join(shown) + 2 * b"[1] second, before\n"


def test_line_without_end_is_cut() -> None:
    stream = io.BytesIO()
    merger = LineMerger(stream, 1, prefix=False)
    merger.feed(0, b"x" * 200_000)
    assert stream.getvalue().count(b"\n") == 3
    merger.finish()
    assert stream.getvalue().replace(b"\n", b"") == b"x" * 200_000


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)), st.data())
def test_no_byte_is_lost_however_it_arrives(lines: list[bytes], data: st.DataObject) -> None:
    text = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stream = io.BytesIO()
    merger = LineMerger(stream, 1, prefix=False)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        merger.feed(0, text[start:end])
    merger.finish()
    assert stream.getvalue() == text
