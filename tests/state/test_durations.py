"""Durations with units, and every so often."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration, Every
from ktrainer.state.progress import Progress


@pytest.mark.parametrize(
    "text, value, unit",
    [
        ("1ep", 1, "ep"), ("0.5ep", 0.5, "ep"), ("500ba", 500, "ba"), ("500 BA", 500, "ba"),
        ("30s", 30, "s"), ("10m", 600, "s"), ("2h", 7200, "s"), ("1d", 86400, "s"),
        ("1h30m", 5400, "s"), ("1.5s", 1.5, "s"), ("0ep", 0, "ep"),
    ],
)  # fmt: skip
def test_parse(text, value, unit):
    parsed = Duration.parse(text)
    assert (parsed.value, parsed.unit) == (value, unit)
    assert type(parsed.value) is type(value)
    assert Duration.parse(parsed) is parsed
    assert Duration.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "ep", "5 apples", "-1ep", "1.5ba", "nans", "infs", "1ep2ba"])
def test_nonsense_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text, "trainer.max_time")
    assert caught.value.path == "trainer.max_time"


def test_a_missing_unit_is_explained():
    with pytest.raises(ConfigError, match="'5ep' for epochs or '5ba' for updates or '5s'"):
        Duration.parse("5")


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text):
    with contextlib.suppress(ConfigError):
        assert Duration.parse(text).value >= 0


def test_steps_and_seconds():
    assert Duration.parse("2ep").steps(50) == 100
    assert Duration.parse("0.5ep").steps(50) == 25
    assert Duration.parse("7ba").steps(None) == 7
    assert Duration.parse("2m").seconds == 120
    with pytest.raises(ConfigError, match="length is unknown"):
        Duration.parse("2ep").steps(None)
    with pytest.raises(ConfigError, match="is a time"):
        Duration.parse("2m").steps(50)
    with pytest.raises(ValueError, match="not a time"):
        Duration.parse("2ep").seconds  # noqa: B018


def fired(every: Every, steps_per_epoch: int, epochs: int, call: int = 1, counted: bool = False):
    """(step, at the epoch's end) of each time that it is due in a run of `call` steps a call."""
    progress, found = Progress(), []
    every.start(progress)
    for _ in range(epochs):
        done = 0
        while done < steps_per_epoch:
            for _ in range(min(call, steps_per_epoch - done)):
                progress.advance(1)
                done += 1
            if every.due(progress):
                found.append((progress.step, False))
        if counted:
            progress.finish_epoch()
        if every.due(progress, epoch_end=True):
            found.append((progress.step, True))
        if not counted:
            progress.finish_epoch()
    return found


@pytest.mark.parametrize("counted", [True, False])
def test_epochs(counted):
    assert fired(Every("1ep"), 3, 3, counted=counted) == [(3, True), (6, True), (9, True)]
    assert fired(Every("2ep"), 3, 5, counted=counted) == [(6, True), (12, True)]


def test_fractions_of_an_epoch():
    steps = [step for step, _ in fired(Every("0.5ep", steps_per_epoch=4), 4, 2)]
    assert steps == [2, 4, 6, 8]
    with pytest.raises(ConfigError, match="length is unknown"):
        fired(Every("0.5ep"), 4, 1)


def test_updates():
    assert fired(Every("2ba"), 3, 2) == [(2, False), (4, False), (6, False)]
    assert fired(Every("100ba"), 3, 2) == []


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(1, 5))
def test_no_multiple_is_missed_or_fires_twice(every, per_epoch, epochs, call):
    found = [step for step, _ in fired(Every(f"{every}ba"), per_epoch, epochs, call)]
    assert len(found) == len(set(found))
    ends = [
        epoch * per_epoch + min(done, per_epoch)
        for epoch in range(epochs)
        for done in range(call, per_epoch + call, call)
    ]
    multiples = range(every, per_epoch * epochs + 1, every)
    assert found == sorted({next(end for end in ends if end >= m) for m in multiples})


def test_time():
    every, progress, found = Every("10s"), Progress(), []
    assert every.needs_agreement
    every.start(progress)
    for _ in range(30):
        progress.advance(1)
        progress.elapsed += 4
        if every.due(progress):
            found.append(progress.elapsed)
    assert found[:3] == [12, 24, 36]


def test_a_resumed_run_fires_where_the_uninterrupted_one_would():
    progress = Progress(epoch=1, batch=2, step=12, elapsed=1000.0)
    for text, due in [("4ba", 16), ("5ba", 15), ("1ep", None), ("30s", None)]:
        every, now = Every(text), Progress(**progress.to_dict())
        every.start(now)
        assert not every.due(now)
        steps = []
        for _ in range(4):
            now.advance(1)
            steps += [now.step] if every.due(now) else []
        assert steps == ([due] if due else [])


def test_a_resume_just_before_an_epoch_ends_still_sees_its_end():
    progress = Progress(epoch=0, batch=5, step=5)
    every = Every("1ep")
    every.start(progress)
    assert every.due(progress, epoch_end=True)
    assert not every.due(progress, epoch_end=True)


def test_never_and_nonsense():
    assert not Every(None).due(Progress(step=5), epoch_end=True)
    assert not Every(None).needs_agreement
    assert repr(Every("1ep")) == "Every('1ep')"
    with pytest.raises(ConfigError, match="above zero"):
        Every("0ba")


@given(
    st.integers(1, 249), st.integers(0, 2000), st.sampled_from(["ba", "ep"]), st.integers(1, 500)
)
@example(value=4, step=1392, unit="ep", steps_per_epoch=469)
def test_updates_until_it_is_due(value, step, unit, steps_per_epoch):
    """A number of updates, or hundredths of an epoch."""
    text = f"{value}ba" if unit == "ba" or value % 100 == 0 else f"{value / 100}ep"
    every = Every(text, steps_per_epoch=steps_per_epoch)
    progress = Progress(step=step)
    until = every.updates_until_due(progress)
    every.start(progress)
    for _ in range(until - 1):
        progress.advance(1)
        assert not every.due(progress)
    progress.advance(1)
    assert every.due(progress)


def test_the_clock_and_whole_epochs_are_no_number_of_updates():
    for duration in ("1ep", "2ep", "5s", None):
        assert Every(duration).updates_until_due(Progress(step=3)) is None
