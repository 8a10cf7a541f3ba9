"""The small models of `keras_fit.py` in a loop by hand with PyTorch.

    python benchmarks/keras_fit_torch.py

PyTorch is no dependency of ktrainer: install its CPU build where this runs, in an environment of
its own. Models, batches and optimizer are those of `keras_fit.py`, with one thread; batches are cut
before the first epoch, and loss and accuracy are summed, as there. Shown is the median epoch of
each but every first one, in milliseconds a step.
"""

from __future__ import annotations

import statistics
import time

from keras_fit_table import BATCH, arguments, what_and_sizes
from pipeline_step_torch import NAME  # says so where PyTorch is missing
from results import record

# isort: split
import torch
from torch import nn

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))


def milliseconds(model: nn.Module, batches: Batches, epochs: int) -> list[float]:
    """Milliseconds a step, of each epoch but the first."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    times = []
    for _ in range(epochs):
        start = time.perf_counter()
        total, right = torch.zeros(()), torch.zeros(())
        for x, y in batches:
            optimizer.zero_grad()
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            right += (outputs.argmax(1) == y).sum()
        assert (total + right).isfinite()
        times.append((time.perf_counter() - start) / len(batches) * 1e3)
    return times[1:]


def main() -> None:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.rand(BATCH * args.steps, 1, 28, 28)
    y = torch.randint(0, 10, (len(x),))
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    for name, build in (("MLP", mlp), ("CNN", cnn)):
        times = [t for _ in range(args.rounds) for t in milliseconds(build(), batches, args.epochs)]
        print(f"{name} {statistics.median(times):7.2f} ms a step")
        record(args.results, *what_and_sizes(name, "auto"), {NAME: times})


if __name__ == "__main__":
    main()
