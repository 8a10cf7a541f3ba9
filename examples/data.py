"""Reading the examples' data: from a local folder, or downloaded by Keras."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

Images = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")
SHAKESPEARE = "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt"


def data_folder() -> tuple[Path | None, list[str]]:
    """The folder given as `--data-dir` (None: let Keras download), and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path, help="folder with the data, in files as published")
    own, rest = parser.parse_known_args()
    return own.data_dir, rest


def mnist(folder: Path | None = None) -> tuple[Images, Images]:
    """MNIST for training and for validation: float32 images [n, 28, 28, 1] in 0..1, labels [n].

    A folder with the test files alone gives its first 80 % for training, the rest for validation.
    """
    if folder is None:
        import keras

        train, validation = downloaded("MNIST", keras.datasets.mnist.load_data)
    elif has(folder, "train-images-idx3-ubyte.gz"):
        train, validation = read_mnist(folder, "train"), read_mnist(folder, "t10k")
    else:
        x, y = read_mnist(folder, "t10k")
        cut = len(x) * 8 // 10
        train, validation = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    return as_float(train), as_float(validation)


def shakespeare(folder: Path | None = None) -> np.ndarray:
    """Shakespeare's plays as one array of bytes, uint8 [n]."""
    if folder is None:
        import keras

        fetch = partial(keras.utils.get_file, "shakespeare.txt", SHAKESPEARE)
        path = Path(downloaded("Shakespeare's plays", fetch))
    else:
        path = find(folder, "input.txt")
    return np.frombuffer(path.read_bytes(), np.uint8)


def downloaded(what: str, fetch: Callable[[], T]) -> T:
    """The result of `fetch()`, which downloads; ends the script if it cannot."""
    try:
        return fetch()
    except Exception as error:  # Keras raises it without a class of its own
        raise SystemExit(
            f"cannot download {what} ({error}): with the files in a folder, give --data-dir FOLDER"
        ) from None


def read_mnist(folder: Path, split: str) -> Images:
    """The images and labels of one split (`train` or `t10k`), as published."""
    images = read_idx(find(folder, f"{split}-images-idx3-ubyte.gz"))
    return images, read_idx(find(folder, f"{split}-labels-idx1-ubyte.gz"))


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the IDX format of MNIST, compressed with gzip.

    Two zero bytes, the type (8 for unsigned bytes), the number of dimensions, each dimension as
    a big-endian int32, then the values.
    """
    with gzip.open(path) as file:
        raw = file.read()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def as_float(split: Images) -> Images:
    images, labels = split
    return (images[..., None] / 255).astype(np.float32), labels.astype(np.int32)


def has(folder: Path, name: str) -> bool:
    return any(folder.rglob(name))


def find(folder: Path, name: str) -> Path:
    """The file `name` anywhere below `folder`."""
    for path in folder.rglob(name):
        return path
    raise FileNotFoundError(f"there is no {name} in {folder}; leave --data-dir out to download it")
