"""Loaders of torch: batches once an epoch, as under `Model.fit`, cut for each rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktrainer.data.prefetch_thread import checked_waits
from ktrainer.errors import CheckpointError, DataError
from tests.data.feeds import Place, Recorder, feed, flat, numbered, rows

X, Y = numbered(50)


class Generator:
    """As much of a `torch.Generator` as is looked at, with numbers of NumPy."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.RandomState(seed)

    def manual_seed(self, seed: int) -> None:
        self.random.seed(seed)

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

    gate: threading.Event | None = None  # before the first batch

    def __init__(self, generator: Generator | None = None) -> None:
        self.dataset, self.random, self.opened = range(50), generator or Generator(), 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        assert self.gate is None or self.gate.wait(20)
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


def test_tensors_that_are_written_again() -> None:
    """As where a data set returns the same array for each batch, with `batch_size=None`."""

    class Refilled(DataLoader):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Iterator[Any]:
            x, y = np.zeros((8, 3), np.float32), np.zeros(8, np.int64)
            for index in range(7):
                x[:], y[:] = index, index
                yield [Tensor(x), Tensor(y)]

    for size in (1, 2):
        made = feed(Refilled(), 0, size)
        made.fingerprint()
        assert set(made.peek(1)[1]) == {0}
        for epoch in (0, 1):
            assert [set(row) for row in rows(list(made.epoch(epoch)))] == [{i} for i in range(7)]


def test_batches_that_are_x_alone() -> None:
    class Alone(DataLoader):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Iterator[Any]:
            return (y for x, y in super().__iter__())

    found = feed(Alone()), feed(DataLoader())
    assert rows(found[0].epoch(1)) == rows(found[1].epoch(1))


class Sampled(Loader):
    """Its sampler is the user's, with a generator of NumPy."""

    sampler = SimpleNamespace(generator=np.random.RandomState(0))

    def __iter__(self) -> Iterator[Any]:
        torch.default_generator.random.random_sample()  # as each opening draws
        return super().__iter__()


class Drawing(Loader):
    """Its items draw, as random transforms do."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield [x, Tensor(y.value + 100 * torch.default_generator.random.randint(9))]


class Chunked(Loader):
    """Its order is drawn in parts, as `RandomSampler(replacement=True)` does."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self.generator = self.random

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            self.generator.random.random_sample()
            yield [x, y]


torch = SimpleNamespace(from_numpy=np.array)


# A signal may end the wait for the first batch of an epoch, or for the second of an update, or a
# validation after the last.
STOPS = [
    (3, ""),
    (3, "closed"),
    (7, ""),
    (7, "closed"),
    (7, "between epochs"),
    (0, "before the first update"),
    (1, "before the first update"),
    (7, "closed and validating"),
]


@pytest.mark.parametrize(
    ("kind", "taken", "then"),
    [
        *((kind, *stop) for kind in (Loader, Sampled, Drawing, Chunked) for stop in STOPS),
        # Of items that draw, in a thread, no run is like another if validation draws meanwhile.
        *((kind, 3, "validated") for kind in (Loader, Sampled, Chunked)),
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
        own = Generator() if kind in (Sampled, Chunked) else torch.default_generator
        feeds = [feed(made(own), 0, 2), feed(DataLoader(torch.default_generator), 0, 2)]
        for each in feeds:
            each.fingerprint()
        return feeds

    def up_to_here() -> tuple[Any, Any, Any, Any]:
        data, validation = begun()
        for number in (0, 1):
            list(data.epoch(number))
            list(validation.epoch(0))
        local_batches = data.epoch(2)
        seen = rows(islice(local_batches, taken))
        if then == "validated":
            list(validation.epoch(0))
        return data, validation, local_batches, seen

    data, validation, local_batches, seen = up_to_here()
    rest = rows(local_batches)
    validated = rows(validation.epoch(0))
    later = [rows(data.epoch(3)), rows(validation.epoch(0))]

    data, validation, local_batches, _ = up_to_here()
    inside = then not in ("between epochs", "before the first update")
    if not taken:
        made.gate = threading.Event()
        wait_in_vain(local_batches, made.gate.set)
    if then:
        local_batches.close()
    if then == "between epochs":
        list(validation.epoch(0))
    if then == "closed and validating":
        list(islice(validation.epoch(0), 2))
    state = data.state(inside_epoch=inside)
    data.close()

    data, validation = begun()
    data.resume_from(state)
    if then != "between epochs":
        expected = rest if inside else seen + rest
        assert rows(data.epoch(2, skip=taken if inside else 0)) == expected
        assert rows(validation.epoch(0)) == validated
    assert [rows(data.epoch(3)), rows(validation.epoch(0))] == later


def wait_in_vain(local_batches: Iterator[Any], then: Callable[[], None]) -> None:
    def end() -> None:
        then()
        raise InterruptedError

    with checked_waits(end), pytest.raises(InterruptedError):
        next(local_batches)


def test_a_look_and_an_interrupted_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the first epoch, of which ranks have looked at a batch, with a sampler's own order,
    and torch without a seed."""
    made = type("DataLoader", (Sampled,), {"__module__": "torch.utils.data.dataloader"})
    monkeypatch.setitem(sys.modules, "torch", torch)

    def begun(seed: int) -> Any:
        torch.default_generator = Generator(seed)
        data = feed(made(Generator()), 0, 2)
        data.fingerprint()
        return data

    data = begun(1)
    local_batches = data.epoch(0)
    list(islice(local_batches, 3))
    state = data.state(inside_epoch=True)
    rest, later = rows(local_batches), rows(data.epoch(1))
    data = begun(2)
    data.resume_from(state)
    local_batches = data.epoch(0, skip=3)
    assert data.state(inside_epoch=True) == state  # saved again, before a batch was read
    assert rows(local_batches) == rest
    assert rows(data.epoch(1)) == later


@pytest.mark.parametrize("inside", [False, True])
def test_first_batches_that_all_epochs_repeat_are_those_of_before_a_resume(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)

    def begun(seed: int) -> Any:
        torch.default_generator = Generator(seed)
        data = feed(DataLoader(torch.default_generator), limit=2)
        data.repeat_first_epoch()
        return data

    data = begun(1)
    first = rows(data.epoch(0))
    local_batches = data.epoch(1)
    list(islice(local_batches, int(inside)))
    state = data.state(inside_epoch=inside)
    data = begun(2)
    data.resume_from(state)
    assert rows(data.epoch(1, skip=int(inside))) == first[int(inside) :]
    assert rows(data.epoch(2)) == first


@pytest.mark.parametrize("size", [1, 2])
def test_any_number_of_ranks_opens_a_loader_as_often(size: int) -> None:
    data = feed(loader := DataLoader(), 0, size)
    data.fingerprint()
    assert len(data.peek(2)[0]) == 8 // size
    assert loader.opened == 1
    list(data.epoch(0))
    assert loader.opened == 2


def test_epochs_are_passed_over_where_more_than_torch_orders_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)

    def openings(kind: type, resumes: bool, size: int = 1) -> int:
        """Of a run that begins with its third epoch."""
        made = type("DataLoader", (kind,), {"__module__": "torch.utils.data.dataloader"})
        torch.default_generator = Generator()
        data, resumed = feed(made(), 0, size), feed(loader := made(), 0, size)
        for epoch in (0, 1):
            list(data.epoch(epoch))
        if resumes:
            resumed.resume_from(data.state(inside_epoch=False))
        list(resumed.epoch(2))
        return loader.opened - 1  # which was to look at it

    assert [openings(Loader, False), openings(Loader, True)] == [3, 1]
    assert [openings(Sampled, False), openings(Sampled, True)] == [3, 3]
    monkeypatch.setattr(Place, "heals", True)  # where only loaders without an order are taken
    assert openings(Loader, False) == 1
    monkeypatch.setattr(Place, "replicas", 1)  # a pipeline takes all
    assert [openings(Loader, False, 2), openings(Sampled, True, 2)] == [3, 3]


def test_the_state_of_another_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch.default_generator = Generator()
    data = feed(DataLoader(torch.default_generator))
    for taken in (7, 3):
        local_batches = data.epoch(0)
        list(islice(local_batches, taken))
        local_batches.close()
        loader = DataLoader(own := Generator())
        loader.generator = own
        resumed = feed(loader)
        resumed.resume_from(data.state(inside_epoch=taken < 7))
        if taken == 7:
            with pytest.warns(UserWarning, match="epoch 2 has the order of a new run"):
                assert len(rows(resumed.epoch(1))) == 7
            continue
        problem = "the order of a torch DataLoader with 0 generators .* with 1 generators"
        with pytest.raises(CheckpointError, match=problem) as refused:
            next(resumed.epoch(0, skip=3))
        assert "epoch 1 cannot continue after batch 3" in str(refused.value)
        assert "checkpoint.iterators=false" in str(refused.value)


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
