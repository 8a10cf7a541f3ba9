"""The step of `data_parallel_step.py` with PyTorch's DistributedDataParallel, over gloo.

    mpirun -n 2 python benchmarks/data_parallel_step_torch.py

PyTorch is no dependency of ktrainer: install its CPU build where this runs, in an environment of
its own. Model, sizes and threads are those of `data_parallel_step.py`; "none" is the same step
without communication, in each process at the same time. Run both on the same idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from data_parallel_table import BATCH, record_steps
from pipeline_step_torch import NAME, join  # says so where PyTorch is missing
from results import add_option

# isort: split
import torch
import torch.distributed as dist
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    widths = (784, 1024, 1024, 1024)
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def step_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def in_turns(variants: dict[str, Callable[..., Any]], data: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds a step, of each variant and round; the variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, step in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for x, y in data:
                loss = step(x, y)
            loss.item()
            dist.barrier()
            if number:  # the first fills the caches
                times[name].append((time.perf_counter() - start) / len(data) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps a round")
    parser.add_argument("--rounds", type=int, default=10)
    add_option(parser)
    args = parser.parse_args()
    rank, size = join()
    torch.manual_seed(rank)
    data = [(torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))) for _ in range(args.steps)]
    variants = {"none": step_of(build_model())}
    variants["DDP"] = step_of(nn.parallel.DistributedDataParallel(build_model()))
    times = in_turns(variants, data, args.rounds)
    if rank == 0:
        print(f"torch {torch.__version__}, {size} processes, batch {BATCH} each")
        for name, values in times.items():
            print(f"{name:20s} {statistics.median(values):7.2f} ms a step")
        record_steps(args.results, size, f"{NAME} DDP", times["DDP"], times["none"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
