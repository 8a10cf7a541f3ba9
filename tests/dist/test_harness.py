"""The pool of ranks and the leak checks do what other tests rely on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.harness import PerRank, RankError, RankLost, Ranks, RanksTimeout, leaks

Group = Callable[..., Ranks]


def _place(factor: int = 1) -> tuple[int, int, int]:
    from ktrainer import distributed

    here = distributed.current_world()
    return here.rank * factor, here.size, os.getpid()


def _fail_on(rank: int) -> str:
    from ktrainer import distributed

    if distributed.current_world().rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    return "fine"


def _sum_of_ranks() -> float:
    from ktrainer import distributed

    here = distributed.current_world()
    return float(here.oob_allreduce(float(here.rank), "sum"))


def _identity(value: object) -> object:
    return value


def _sleep_on(rank: int, seconds: float) -> None:
    from ktrainer import distributed

    if distributed.current_world().rank == rank:
        time.sleep(seconds)


def _end_on(rank: int) -> None:
    from ktrainer import distributed

    if distributed.current_world().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


_enough = threading.Event()


def _leak_thread() -> None:
    _enough.clear()
    threading.Thread(target=_enough.wait, name="forgotten").start()


def _end_thread() -> None:
    _enough.set()


def _leak_variable() -> None:
    os.environ["FORGOTTEN"] = "1"


def _give_time_to_end(seconds: float) -> None:
    leaks.seconds_to_end = seconds


def _is_set(name: str) -> bool:
    return name in os.environ


def test_results_come_by_rank_and_processes_are_kept(ranks: Group) -> None:
    first = ranks(2).run(_place, factor=10)
    again = ranks(2).run(_place)
    assert [r[:2] for r in first] == [(0, 2), (10, 2)]
    assert [r[2] for r in first] == [r[2] for r in again]


def test_each_rank_can_get_its_own_argument(ranks: Group) -> None:
    assert ranks(2).run(_identity, PerRank(["a", "b"])) == ["a", "b"]
    assert ranks(2).run(_identity, value=PerRank([{1}, None])) == [{1}, None]


def test_error_carries_the_ranks_traceback_and_type(ranks: Group) -> None:
    with pytest.raises(RankError, match=r"_fail_on raised on rank\(s\) 1 of 2") as caught:
        ranks(2).run(_fail_on, 1)
    assert 'raise ValueError(f"rank {rank} has had enough")' in str(caught.value)
    assert isinstance(caught.value.errors[1], ValueError)
    assert ranks(2).outcomes(_fail_on, 0)[1].value == "fine"


def test_collectives_work_after_a_rank_left_one(ranks: Group) -> None:
    assert ranks(3).run(_sum_of_ranks) == [3.0] * 3
    outcomes = ranks(3).outcomes(_leave_a_collective, deadline=30)
    assert all(outcome.error is not None for outcome in outcomes)
    assert ranks(3).run(_sum_of_ranks) == [3.0] * 3


def _leave_a_collective() -> None:
    from ktrainer import distributed

    here = distributed.current_world()
    here.deadline = 0.5
    if here.rank == 0:
        raise RuntimeError("not coming")
    here.barrier("of those who came")


def test_late_rank_is_named_with_its_stack_and_group_is_replaced(ranks: Group) -> None:
    pids = [r[2] for r in ranks(2, "late").run(_place)]
    with pytest.raises(RanksTimeout, match=r"no answer from rank\(s\) 1") as caught:
        ranks(2, "late").run(_sleep_on, 1, 60.0, deadline=3.0)
    assert "_sleep_on" in str(caught.value)
    assert set(pids).isdisjoint(r[2] for r in ranks(2, "late").run(_place))


def test_lost_rank_is_named(ranks: Group) -> None:
    # Rank 0 is lost with it if mpirun is quicker than this process.
    with pytest.raises(RankLost, match=r"rank 1 is lost|ranks 0, 1 are lost"):
        ranks(2, "late").run(_end_on, 1)


def test_rank_that_leaves_something_behind_fails(ranks: Group) -> None:
    before = leaks.seconds_to_end
    ranks(2).run(_give_time_to_end, 0.5)
    try:
        with pytest.raises(RankError, match="thread: forgotten"):
            ranks(2).run(_leak_thread)
        ranks(2).run(_end_thread)
        with pytest.raises(RankError, match="variable: FORGOTTEN=1"):
            ranks(2).run(_leak_variable)
    finally:
        ranks(2).run(_give_time_to_end, before)
    assert ranks(2).run(_is_set, "FORGOTTEN") == [False, False]


def test_nested_function_is_refused_with_the_remedy(ranks: Group) -> None:
    with pytest.raises(TypeError, match="top level"):
        ranks(2).run(lambda: 1)


def test_leaks_are_found() -> None:
    before = leaks.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Timer(60, print)
    thread.start()
    os.environ["KTRAINER_TEST_LEAK"] = "1"
    try:
        kinds = {line.partition(":")[0] for line in leaks.compare(before, leaks.take())}
    finally:
        thread.cancel()
        listener.close()
        child.communicate()
        del os.environ["KTRAINER_TEST_LEAK"]
    assert {"process", "port", "thread", "variable"} <= kinds
    assert leaks.wait_for_none(before) == []


def test_orphans_are_found() -> None:
    before = leaks.take()
    script = "import subprocess,sys; subprocess.Popen([sys.executable,'-c','import time;"
    script += "time.sleep(60)'],start_new_session=True)"
    subprocess.run([sys.executable, "-c", script], check=True)
    orphans = [line for line in leaks.compare(before, leaks.take()) if "time.sleep" in line]
    assert len(orphans) == 1
    pid = int(orphans[0].split(":")[1])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class _OnlyThere:
    """Pickles on a rank, and loads nowhere."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_result_that_does_not_load_is_an_error_of_that_task(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_OnlyThere):
        assert isinstance(outcome.error, TypeError)
        assert "no number" in str(outcome.error)
    assert [rank for rank, _, _ in ranks(2).run(_place, 10)] == [0, 10]
