"""The pipelines of `pipeline_step.py` with torch.distributed.pipelining, over gloo.

    mpirun -n 2 python benchmarks/pipeline_step_torch.py

PyTorch is no dependency of ktrainer: install its CPU build where this runs, in an environment of
its own. Models, sizes, threads and columns are those of `pipeline_step.py`: "single" is rank 0
alone, which adds up the gradients of the same microbatches; stages are halves of the blocks. Run
both on the same idle machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline_table import (
    BLOCKS,
    DEPTH,
    HEADER,
    MODEL_WIDTH,
    SEQUENCE,
    TOKENS,
    WIDTH,
    arguments,
    measure,
    pin,
    record_case,
    row,
)

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
except ImportError as error:
    sys.exit(f"this benchmark needs PyTorch ({error}): pip install torch, in its CPU build.")

NAME = f"PyTorch {torch.__version__.partition('+')[0]}"
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(MODEL_WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(MODEL_WIDTH, 3 * MODEL_WIDTH)
        self.out = nn.Linear(MODEL_WIDTH, MODEL_WIDTH)
        self.up = nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH)
        self.down = nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        heads = self.qkv(self.norms[0](x)).view(rows, SEQUENCE, 3, 4, MODEL_WIDTH // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, SEQUENCE, MODEL_WIDTH))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


def dense() -> list[nn.Module]:
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
    return [*hidden, nn.Linear(WIDTH, 10)]


def transformer() -> list[nn.Module]:
    blocks = [Block() for _ in range(BLOCKS)]
    return [nn.Embedding(TOKENS, MODEL_WIDTH), *blocks, nn.Linear(MODEL_WIDTH, TOKENS)]


def dense_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(256, WIDTH), torch.randint(0, 10, (256,))


def transformer_batch() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(0, TOKENS, (2, 64, SEQUENCE))
    return x, y


CASES = {"dense": (dense, dense_batch), "transformer": (transformer, transformer_batch)}


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def stage_modules(modules: list[nn.Module], rank: int, size: int) -> nn.Module:
    """An equal share of the layers: what is before the first cut, between cuts, and after."""
    blocks = [k for k, m in enumerate(modules) if not isinstance(m, (nn.Embedding, nn.Linear))]
    cuts = [blocks[len(blocks) * r // size] for r in range(1, size)]
    edges = [0, *cuts, len(modules)]
    return nn.Sequential(*modules[edges[rank] : edges[rank + 1]])


def single(modules: list[nn.Module], batch: Any, count: int) -> Callable[[], Any]:
    model = nn.Sequential(*modules)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    parts = list(zip(*(x.chunk(count) for x in batch), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in parts:
            loss = loss_of(model(x), y) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def pipeline(
    modules: list[nn.Module], batch: Any, count: int, kind: str, rank: int, size: int
) -> Callable[[], Any]:
    module = stage_modules(modules, rank, size)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[kind](stage, n_microbatches=count, loss_fn=loss_of)
    x, y = batch

    def step() -> Any:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return sum(x.item() for x in losses) / count

    return step


def join() -> tuple[int, int]:
    """Join the group of processes that mpirun started; return rank and size."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if size < 2:
        sys.exit("start at least two processes: mpirun -n 2 python " + " ".join(sys.argv))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return rank, size


def main() -> None:
    parser = arguments(__doc__, [*CASES])
    args = parser.parse_args()
    if unknown := set(args.schedules) - set(SCHEDULES):
        parser.error(
            f"--schedules: no {', '.join(sorted(unknown))}; there are {', '.join(SCHEDULES)}"
        )
    rank, size = join()
    if args.pin:
        pin(rank)
    if rank == 0:
        print(f"torch {torch.__version__}, {size} processes of one thread")
        print(HEADER)
    for name in args.models:
        build, make_batch = CASES[name]
        for count in args.microbatches:
            torch.manual_seed(0)
            batch = make_batch()
            steps = {
                kind: pipeline(build(), batch, count, kind, rank, size) for kind in args.schedules
            }
            steps["single"] = single(build(), batch, count)
            times = measure(steps, args, rank, dist.barrier)
            if rank == 0:
                for kind in args.schedules:
                    print(row(name, kind, count, size, times), flush=True)
                record_case(args, name, count, size, f"{NAME} pipelining", times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
