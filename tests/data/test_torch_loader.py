"""Loaders of torch: batches once an epoch, as under `Model.fit`, cut for each rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import DataError
from tests.data.feeds import Recorder, feed, flat, numbered, rows

X, Y = numbered(50)


class Generator:
    """As much of a `torch.Generator` as is looked at, with numbers of NumPy."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)

    def get_state(self) -> np.ndarray:
        _, words, position, *_ = self.random.get_state()
        return np.frombuffer(np.append(words, np.uint32(position)).tobytes(), np.uint8)

    def set_state(self, state: np.ndarray) -> None:
        *words, position = np.frombuffer(state.tobytes(), np.uint32)
        self.random.set_state(("MT19937", words, int(position)))


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

    def __init__(self, generator: Generator | None = None) -> None:
        self.dataset, self.random, self.opened = range(50), generator or Generator(), 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        order = self.random.random.permutation(50)
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


class Sampled(Loader):
    """Its sampler has a generator of its own, which no attribute of the loader is."""

    def __iter__(self) -> Iterator[Any]:
        torch.default_generator.random.random_sample()  # as each opening draws
        return super().__iter__()


class Drawing(Loader):
    """Its items draw, as random transforms do."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield [x, Tensor(y.value + 100 * torch.default_generator.random.randint(9))]


torch = SimpleNamespace(from_numpy=np.array)


STOPS = [(3, ""), (3, "closed"), (7, ""), (7, "closed"), (7, "between epochs")]


@pytest.mark.parametrize(
    ("kind", "taken", "then"),
    [
        *((kind, *stop) for kind in (Loader, Sampled, Drawing) for stop in STOPS),
        # Of items that draw, in a thread, no run is like another if validation draws meanwhile.
        *((kind, 3, "validated") for kind in (Loader, Sampled)),
    ],
)
def test_a_resumed_loader_has_the_draws_of_others(
    kind: type, taken: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of validation data draws from torch's generator, too."""
    made = type("DataLoader", (kind,), {"__module__": "torch.utils.data.dataloader"})
    monkeypatch.setitem(sys.modules, "torch", torch)

    def begun() -> list[Any]:
        """Training and validation data, which ranks have looked at."""
        torch.default_generator = Generator()
        own = Generator() if kind is Sampled else torch.default_generator
        size = 1 if kind is Drawing else 2  # a look at its first batch would draw ahead
        feeds = [feed(made(own), 0, size), feed(DataLoader(torch.default_generator), 0, size)]
        for each in feeds:
            each.fingerprint()
        return feeds

    def up_to_here() -> tuple[Any, Any, Any]:
        data, validation = begun()
        for number in (0, 1):
            list(data.epoch(number))
            list(validation.epoch(0))
        local_batches = data.epoch(2)
        list(islice(local_batches, taken))
        if then == "validated":
            list(validation.epoch(0))
        return data, validation, local_batches

    data, validation, local_batches = up_to_here()
    rest = rows(local_batches)
    list(validation.epoch(0))
    later = rows(data.epoch(3))

    data, validation, local_batches = up_to_here()
    if then in ("closed", "between epochs"):
        local_batches.close()
    if then == "between epochs":
        list(validation.epoch(0))
    state = data.state(inside_epoch=then != "between epochs")
    data.close()

    data, validation = begun()
    data.resume_from(state)
    validation.drop_peeked()
    if then != "between epochs":
        assert rows(data.epoch(2, skip=taken)) == rest
        list(validation.epoch(0))
    assert rows(data.epoch(3)) == later


def test_a_look_and_an_interrupted_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the first epoch, of which ranks have looked at a batch, with a sampler's own order."""
    made = type("DataLoader", (Sampled,), {"__module__": "torch.utils.data.dataloader"})
    monkeypatch.setitem(sys.modules, "torch", torch)

    def begun() -> Any:
        torch.default_generator = Generator()
        data = feed(made(Generator()), 0, 2)
        data.fingerprint()
        return data

    data = begun()
    local_batches = data.epoch(0)
    list(islice(local_batches, 3))
    state = data.state(inside_epoch=True)
    rest, later = rows(local_batches), rows(data.epoch(1))
    data = begun()
    data.resume_from(state)
    local_batches = data.epoch(0, skip=3)
    assert data.state(inside_epoch=True) == state  # saved again, before a batch was read
    assert rows(local_batches) == rest
    assert rows(data.epoch(1)) == later


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
    state = made.state(inside_epoch=False)
    assert state is not None
    third = rows(made.epoch(2))
    resumed = feed(loader)
    resumed.resume_from(state)
    assert rows(resumed.epoch(2)) == third
