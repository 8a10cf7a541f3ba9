"""Messages about what slows training."""

from __future__ import annotations

CPU_SHARE = 0.7  # of the processor time that a rank's threads asked for
FAULTS = 5.0  # a step, of pages that are read from the disk


def data(when: str, rank: int, ranks: int, part: float, stage: str | None) -> str:
    """A wait for data.

    Args:
        when: empty, or words that end with a blank.
        part: of the time.
        stage: the slow stage of the input.
    """
    who = f"rank {rank} waits" if ranks > 1 else "the steps wait"
    return (
        f"input is the bottleneck: {when}{who} for data {part:.0%} of the time; the slowest stage: "
        f"{stage or 'unknown'}. Make it faster or give it more threads or processes "
        "(logging.slow=null: no hint)"
    )


def callback(share: str, seconds: float, part: float, rank: int, ranks: int, alike: bool) -> str:
    """A callback that takes long.

    Args:
        seconds, part: of each step.
        alike: on all ranks.
    """
    where = "" if ranks == 1 else " on all ranks" if alike else f" on rank {rank}"
    takes = f"{share} takes {_ms(seconds)} of each step{where} ({part:.0%})"
    return f"{takes}: do less in it, or less often"


def callback_in_epoch(
    epoch: int, share: str, rank: int, ranks: int, part: float, seconds: float
) -> str:
    """A callback that has taken a large part of an epoch."""
    where = f" on rank {rank}" if ranks > 1 else ""
    return f"{share} took {part:.0%} of epoch {epoch}{where}, {seconds:.1f} s"


def wait_in_epoch(epoch: int, rank: int, slow: int, part: float, seconds: float) -> str:
    """A rank that has waited for another one."""
    return (
        f"in epoch {epoch} rank {rank} waited for rank {slow} {part:.0%} of the time, "
        f"{seconds:.1f} s: rank {slow} has more to do, or a slower machine"
    )


def longer_than_others(who: str, seconds: float, usual: float, why: str) -> str:
    """A rank that computes longer than the others."""
    return (
        f"{who} computes {_times(seconds, usual)} as the others ({_ms(seconds)} a step): it {why}"
    )


def longer_than_before(who: str, seconds: float, before: float, why: str) -> str:
    """Steps that take longer than before because of a rank."""
    return f"steps take {_times(seconds, before)} as before ({_ms(seconds)}): {who} {why}"


def slow_link(seconds: float, before: float, link: str, hidden: bool) -> str:
    """Communication that takes longer than before.

    Args:
        link: a sentence on the slowest link.
        hidden: whether it is known only that steps take longer.
    """
    times, takes = _times(seconds, before), _ms(seconds)
    if hidden:
        return f"steps take {times} as before ({takes}) on all ranks: {link}"
    return f"communication takes {times} as before ({takes} a step), though no rank is late: {link}"


def reason(cpu: float | None, least: float | None, faults: float) -> tuple[str, str]:
    """Why steps take long on a rank: the cause, and the words that follow its name.

    Args:
        cpu: the part that it got of the processor time that its threads asked for.
        least: the smallest of all ranks: where one is short of it, the others wait for it.
        faults: pages a step that it read from the disk.
    """
    if cpu is not None and cpu == least and cpu < CPU_SHARE:
        return "cpu", (
            f"got {cpu:.0%} of the processor time that its threads asked for; other processes, or "
            "too many threads of its own, are on its cores"
        )
    if faults >= FAULTS:
        return "memory", (
            f"read {faults:.0f} pages of its memory a step from the disk: it is short of memory, "
            "or its data is in a file that is mapped to memory"
        )
    return "compute", "has its processors and memory, so it has more to do, or slower processors"


def _times(seconds: float, usual: float) -> str:
    return f"{seconds / max(usual, 1e-9):.1f} x as long"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
