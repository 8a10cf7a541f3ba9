"""Real processes for tests: a pool of MPI ranks that outlives single tests, and leak checks.

    test process                      mpirun -n 3
    ┌──────────────┐   unix socket   ┌────────────┐
    │ ranks(3)     ├────────────────►│ rank 0     │
    │   .run(f, x) ├────────────────►│ rank 1     │  f(x) on each; the result, or the
    │              ├────────────────►│ rank 2     │  traceback, comes back the same way
    └──────────────┘                 └────────────┘

Tasks and results never travel over MPI, so nothing here can disturb, or be disturbed by, the
communicators under test.
"""

from __future__ import annotations

from tests.dist.harness.errors import Outcome, RankError, RankLost, RanksTimeout
from tests.dist.harness.group import PerRank, Ranks
from tests.dist.harness.pool import Pool

__all__ = ["Outcome", "PerRank", "Pool", "RankError", "RankLost", "Ranks", "RanksTimeout"]
