"""The step of `data_parallel_step.py` with PyTorch's DistributedDataParallel, over gloo.

    mpirun -n 2 python benchmarks/data_parallel_step_torch.py

PyTorch is no dependency of ktrainer: install its CPU build where this runs, in an environment of
its own. Model, sizes and threads are those of `data_parallel_step.py`; "none" is the same step
without communication, in each process at the same time. Run both on the same idle machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

from data_parallel_table import BATCH, arguments, in_turns, record_steps, sizes
from pipeline_step_torch import NAME, join  # says so where PyTorch is missing

# isort: split
import torch
import torch.distributed as dist
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    widths = (784, 1024, 1024, 1024)
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def step_of(model: nn.Module) -> Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main() -> None:
    args = arguments(__doc__).parse_args()
    rank, size = join()
    torch.manual_seed(rank)
    data = [(torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))) for _ in range(args.steps)]
    variants = {"none": step_of(build_model())}
    variants["DDP"] = step_of(nn.parallel.DistributedDataParallel(build_model()))
    times = in_turns(variants, data, dist.barrier, args.rounds, torch.Tensor.item)
    if rank == 0:
        print(f"torch {torch.__version__}, {size} processes, batch {BATCH} each")
        for name, values in times.items():
            print(f"{name:20s} {statistics.median(values):7.2f} ms a step")
        record_steps(args.results, sizes(size), f"{NAME} DDP", times["DDP"], times["none"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
