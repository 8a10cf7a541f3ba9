"""Consistency check: all ranks must hold the same model, data, configuration and weights.

Before step 1 the ranks compare digests of these, and while training, checksums of the weights.
Every rank names each difference, with the ranks; only a few bytes are sent unless there is one.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ktrainer.data.data_agreement import RANDOM_AUGMENTATION
from ktrainer.distributed.world import World
from ktrainer.errors import DivergenceError
from ktrainer.steps.named_variables import vocabulary_digests

if TYPE_CHECKING:
    import keras

    from ktrainer.data import Feed

_SHOWN = 8  # differences listed in one message
_REMEDIES = {
    "examples": "Every rank must read the same example at an index. Random augmentation belongs in "
    "transform(item, generator) of ktrainer.data.Examples(source, transform, random=True), whose "
    "numbers are the same on every rank.",
    "config": "Start every rank with the same configuration and command line.",
    "model": "Build the same model on every rank.",
    "vocabulary": "Adapt the layer to the same data on every rank, or give it a vocabulary.",
    "data": (
        "With data.batch=global every rank must be given the same data in the same order: seed "
        "every shuffle (`dataset.shuffle(n, seed=0)`, `torch.manual_seed(0)`). If each rank has "
        f"data of its own, set data.batch=per_worker. {RANDOM_AUGMENTATION}"
    ),
    "version": "Install the same library versions on every node.",
}


def check_consistency(
    world: World,
    *,
    config: Mapping[str, Any] | None = None,
    model_facts: Mapping[str, str] | None = None,
    data_facts: Mapping[str, str] | None = None,
    versions: Mapping[str, Any] | None = None,
) -> None:
    """Compare configuration, model, data and versions of all ranks; None is not compared.

    Args:
        world: the ranks.
        config: nested or flat configuration values.
        model_facts: from `model_facts`.
        data_facts: from `data_facts`, of all feeds.
        versions: library -> version.

    Raises:
        DivergenceError: on every rank, naming what differs and each rank's value.
    """
    if world.size == 1:
        return
    facts = named_facts(config, model_facts, data_facts, versions)
    what = "compare config, model and data"
    digests = _exchange(world, _digest64(sorted(facts.items())), what)
    if (digests == digests[0]).all():
        return
    everyone = world.allgather(facts, what)
    names = sorted({name for other in everyone for name in other}, key=_order)
    different = [name for name in names if len({other.get(name) for other in everyone}) > 1]
    raise DivergenceError(_explain(different, everyone, world.ranks))


def named_facts(
    config: Mapping[str, Any] | None = None,
    model_facts: Mapping[str, str] | None = None,
    data_facts: Mapping[str, str] | None = None,
    versions: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """What `check_consistency` compares, by name."""
    return {
        **_flatten("config", config or {}),
        **_flatten("model", model_facts or {}),
        **_flatten("data", data_facts or {}),
        **_flatten("version", versions or {}),
    }


def require_same_facts(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise an error if facts of a rank that joins are not those of the others.

    Args:
        mine, theirs: from `named_facts`. Facts of the data that only one side has are not
            compared: a process that began alone has fewer.

    Raises:
        DivergenceError: naming the first that differs.
    """
    names = sorted({*mine, *theirs}, key=_order)
    known = [n for n in names if not n.startswith("data ") or (n in mine and n in theirs)]
    different = [name for name in known if mine.get(name) != theirs.get(name)]
    if different:
        first = different[0]
        more = f", and {len(different) - 1} more differ" if different[1:] else ""
        raise DivergenceError(
            f"this process cannot join: {first} is {mine.get(first, 'missing')} here, but "
            f"{theirs.get(first, 'missing')} on the ranks that train{more}. The script, its "
            "configuration, its data or a library has changed since they began: restore it, or "
            "start all ranks again"
        )


def model_facts(model: keras.Model, rates: bool = True) -> dict[str, str]:
    """Properties that must be equal for two ranks to train the same model.

    Layer and variable names are compared without the numbers that make them unique.

    Args:
        rates: whether to include learning rates that are numbers.
    """
    facts = {"class": type(model).__name__}
    for i, layer in enumerate(_layers(model)):
        config = _text(layer.get_config)
        facts[f"layer {i}"] = f"{type(layer).__name__} {_short(config)}"
    for i, variable in enumerate(model.variables):
        name = _plain(variable.path)
        facts[f"variable {i} ({name})"] = f"{variable.dtype}{list(variable.shape)}"
    for name, digest in vocabulary_digests(model).items():
        facts[f"vocabulary of {name}"] = digest
    facts["trainable variables"] = str(len(model.trainable_variables))
    for name, value in (_config_of(getattr(model, "get_compile_config", dict)) or {}).items():
        facts[f"compile {name}"] = _dump(value)[:200]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        config = _config_of(optimizer.get_config)
        config = config if rates else _without_rates(config)
        facts["compile optimizer"] = f"{type(optimizer).__name__} {_dump(config)}"
    return facts


def data_facts(feed: Feed, name: str = "training") -> dict[str, str]:
    """The fingerprint of a feed, its entries prefixed by `name`."""
    return {f"{name}/{key}": value for key, value in feed.fingerprint().items()}


_INTEGER = (
    " An integer that a layer computes from its rows, such as their count, is each rank's own. To "
    'add up what all ranks add, make it with add_weight(..., trainable=False, aggregation="sum").'
)


def without_order(facts: Mapping[str, str]) -> dict[str, str]:
    """`data_facts` of all feeds, but those of the order, which each start may draw."""
    orders = ("training/order", "validation/order")  # not an array of this name
    return {name: fact for name, fact in facts.items() if name not in orders}


def audit(world: World, named_arrays: Mapping[str, Any]) -> None:
    """Check that arrays are bitwise the same on all ranks.

    About 1 ms per 3 MB (CRC-32 of each array) and one message of a few bytes.

    Args:
        world: the ranks.
        named_arrays: name -> NumPy array or tensor, in the same order on all ranks.

    Raises:
        DivergenceError: on every rank, naming the first array that differs, and the ranks.
    """
    if world.size == 1:
        return
    sums = {name: checksum(value) for name, value in named_arrays.items()}
    what = "audit the weights"
    digests = _exchange(world, _digest64(list(sums.items())), what)
    if (digests == digests[0]).all():
        return
    integers = {n for n, value in named_arrays.items() if np.asarray(value).dtype.kind in "iu"}
    raise _audit_error(world, world.allgather(sums, what), integers)


def _audit_error(
    world: World, everyone: list[dict[str, str]], integers: Collection[str]
) -> DivergenceError:
    names = list(dict.fromkeys(name for other in everyone for name in other))
    different = [n for n in names if len({other.get(n) for other in everyone}) > 1]
    if not different:
        return DivergenceError(
            "weight audit: all ranks hold the same arrays, but in different orders: "
            + _groups([", ".join(other) for other in everyone], world.ranks)
        )
    return DivergenceError(
        f"weight audit at step {world.step}: {different[0]!r} is not the same on all ranks: "
        f"{_groups([other.get(different[0], 'missing') for other in everyone], world.ranks)}. "
        f"{len(different)} of {len(names)} arrays differ. Something changed a weight on some ranks "
        "only: look for a callback or train_step that acts by rank, or for random numbers in it."
        + (_INTEGER if different[0] in integers else "")
    )


def _exchange(world: World, value: int, what: str) -> np.ndarray:
    table = np.zeros(world.size, np.int64)
    table[world.rank] = value
    return world.oob_allreduce(table, "sum", what)


def _digest64(value: Any) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def checksum(value: Any) -> str:
    """Type, shape and checksum of an array's values."""
    array = np.ascontiguousarray(value)
    crc = zlib.crc32(array.reshape(-1).view(np.uint8).data) if array.size else 0
    return f"{array.dtype}{list(array.shape)} {crc:08x}"


def _flatten(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        separator = " " if " " not in prefix else "."
        name = f"{prefix}{separator}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(name, value)
        else:
            flat[name] = str(value)
    return flat


def _order(name: str) -> tuple[int, str]:
    # Cause before consequence: another version or config explains another model or data.
    kinds = ("version", "config", "model", "data")
    return kinds.index(name.split(" ", 1)[0]), name


def _explain(different: list[str], everyone: list[dict[str, str]], members: Sequence[int]) -> str:
    lines = ["ranks disagree on what to train:"]
    for name in different[:_SHOWN]:
        lines.append(
            f"  {name}: {_groups([facts.get(name, 'missing') for facts in everyone], members)}"
        )
    if len(different) > _SHOWN:
        lines.append(f"  and {len(different) - _SHOWN} more")
    kinds = dict.fromkeys(map(_kind, different))
    return "\n".join(lines + [_REMEDIES[kind] for kind in kinds])


def _kind(name: str) -> str:
    if name.startswith("model vocabulary of "):
        return "vocabulary"
    return "examples" if "/examples/" in name else name.split(" ", 1)[0]


def _groups(values: list[str], members: Sequence[int]) -> str:
    """`rank 0: a; ranks 1, 2: b`, where `members` are the ranks that the values are of."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(r) for r, other in zip(members, values, strict=True) if other == value]
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {value}")
    return "; ".join(parts)


def _layers(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten(include_self=False)) if flatten is not None else list(model.layers)


def _without_rates(config: Any) -> Any:
    """An optimizer's configuration, and that of one inside it, without learning rates that are
    numbers: a joining rank receives their values. Schedules stay: each process computes its own."""
    if not isinstance(config, dict):
        return config
    rate = config.get("learning_rate")
    rest = {n: _without_rates(value) for n, value in config.items() if n != "learning_rate"}
    return {**rest, "learning_rate": rate} if isinstance(rate, dict) else rest


def _config_of(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception:  # users' classes need not be serialisable to be trained
        return None


def _text(get: Callable[[], Any]) -> str:
    return _dump(_config_of(get))


def _dump(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return _plain(re.sub(r"0x[0-9a-f]+", "", text))


def _plain(name: str) -> str:
    """Without the numbers that make names unique: they depend on what was built before."""
    return re.sub(r"_\d+\b", "", name)


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
