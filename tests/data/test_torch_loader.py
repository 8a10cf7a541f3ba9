"""Loaders of torch: batches once an epoch, as under `Model.fit`, cut for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import DataError
from tests.data.feeds import Recorder, feed, flat, numbered, rows

X, Y = numbered(50)


class Tensor:
    """As much of a tensor of torch as is looked at."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype)


class Loader:
    """As much of a `torch.utils.data.DataLoader` as is looked at; shuffles each time."""

    def __init__(self) -> None:
        self.dataset, self.random, self.opened = range(50), np.random.default_rng(0), 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        order = self.random.permutation(50)
        for start in range(0, 50, 8):
            rows = order[start : start + 8]
            yield [Tensor(X[rows]), Tensor(Y[rows])]


DataLoader = type("DataLoader", (Loader,), {"__module__": "torch.utils.data.dataloader"})


def test_a_loader_of_torch() -> None:
    made = feed(loader := DataLoader())
    assert made.num_batches == 7
    epochs = [rows(made.epoch(epoch)) for epoch in range(3)]
    assert loader.opened == 4  # as by Model.fit: once for a look at the shapes
    same = Loader()
    expected = [[part[1].value.tolist() for part in same] for _ in range(4)]
    assert epochs == expected[1:]
    assert rows(feed(DataLoader()).epoch(2, skip=3)) == epochs[2][3:]
    parts = [list(feed(DataLoader(), rank, 2).epoch(0)) for rank in range(2)]
    for epoch, one in [(0, feed(DataLoader(), 0, 2)), (1, feed(DataLoader(), 0, 2))]:
        one.fingerprint()  # a look at the first batch, then a resume inside an epoch
        mine = [part[: (len(part) + 1) // 2] for part in epochs[epoch]]
        assert rows(one.epoch(epoch, skip=3)) == mine[3:]
    joined = [
        np.concatenate([a.batch[1], b.batch[1]]).tolist() for a, b in zip(*parts, strict=True)
    ]
    assert joined == epochs[0]
    with pytest.raises(DataError, match="class_weight does not go with a torch DataLoader"):
        feed(DataLoader(), class_weight={0: 1.0})


@pytest.mark.filterwarnings("ignore")
def test_a_real_loader_of_torch() -> None:
    torch = pytest.importorskip("torch")
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(pairs, batch_size=8, shuffle=True)
    model = Recorder()
    model.compile("sgd", "mse", run_eagerly=True)
    torch.manual_seed(1)
    model.fit(loader, epochs=2, verbose=0, shuffle=False)
    torch.manual_seed(1)
    made = feed(loader)
    assert flat(rows(made.epoch(epoch)) for epoch in range(2)) == model.seen
