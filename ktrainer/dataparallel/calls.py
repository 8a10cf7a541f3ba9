"""Descriptions of collective calls, which ranks compare before they communicate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

_SHOWN = 4  # tensors of a call that a message names


class Spec(NamedTuple):
    """Type and shape of a tensor; -1 is a dimension in which ranks may differ."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if n < 0 else str(n) for n in self.shape)}]"


class Call:
    """One collective operation, equal on all ranks that take part in it.

    Attributes:
        operation: what it is, for messages: `"allreduce (average) of parameter 2 of 7"`.
        kind: the function that carries it out; see `ktrainer.dataparallel.handlers`.
        tensors: the inputs.
        detail: what else that function must know: strings and numbers.
    """

    def __init__(
        self, operation: str, kind: str, tensors: tuple[Spec, ...] = (), detail: Any = None
    ) -> None:
        self.operation, self.kind, self.tensors, self.detail = operation, kind, tensors, detail

    @cached_property
    def digest(self) -> int:
        """63 bits that differ where anything of the call does."""
        text = repr((self.operation, self.kind, self.tensors, self.detail))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def __str__(self) -> str:
        shown = [str(spec) for spec in self.tensors[:_SHOWN]]
        more = len(self.tensors) - len(shown)
        shown += [f"{more} more"] if more else []
        return f"{self.operation}: {', '.join(shown)}" if shown else self.operation


@lru_cache(4096)
def call_of(operation: str, kind: str, tensors: tuple[Spec, ...] = (), detail: Any = None) -> Call:
    """The call with these attributes; its digest is computed once."""
    return Call(operation, kind, tensors, detail)


def spec_of(array: np.ndarray) -> Spec:
    """Type and shape of an array."""
    return Spec(array.dtype.name, array.shape)


def specs_of(arrays: Iterable[np.ndarray]) -> tuple[Spec, ...]:
    """Types and shapes of arrays."""
    return tuple(spec_of(array) for array in arrays)


def rows_spec(array: np.ndarray) -> Spec:
    """Type and shape of an array of which ranks may have different numbers of rows."""
    return Spec(array.dtype.name, (-1, *array.shape[1:]))


def difference(calls: Mapping[int, Call]) -> str | None:
    """The first two ranks with different calls, and these calls; None if all are equal.

    Args:
        calls: by rank.
    """
    first = min(calls)
    for rank in sorted(calls):
        if calls[rank].digest != calls[first].digest:
            ours, theirs = _texts(calls[first], calls[rank])
            return f"rank {first} is in {ours}; rank {rank} is in {theirs}"
    return None


def _texts(ours: Call, theirs: Call) -> tuple[str, str]:
    """Both calls, as briefly as shows how they differ."""
    if ours.operation == theirs.operation and ours.tensors == theirs.tensors:
        return _with_detail(ours), _with_detail(theirs)
    same = ours.operation == theirs.operation and len(ours.tensors) == len(theirs.tensors)
    if not same or len(ours.tensors) <= _SHOWN:
        return str(ours), str(theirs)
    both = zip(ours.tensors, theirs.tensors, strict=True)
    place = next(k for k, (mine, other) in enumerate(both) if mine != other)
    texts = [f"{call.operation}, tensor {place}: {call.tensors[place]}" for call in (ours, theirs)]
    return texts[0], texts[1]


def _with_detail(call: Call) -> str:
    detail = call.detail if isinstance(call.detail, tuple) else ((call.kind, call.detail),)
    return f"{call} with {', '.join(f'{name}={value}' for name, value in detail)}"
