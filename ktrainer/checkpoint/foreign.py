"""What in a model's description is not Keras' own, and so must not be made from a file.

Keras' safe mode refuses Lambda layers, but imports any module that a description names. Here only
classes and functions that Keras has for building models pass, and nothing is imported for others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# Values that Keras writes as objects.
_VALUES = ("__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__")
_KINDS = "activations|constraints|initializers|losses|metrics|optimizers|regularizers"
_FUNCTIONS = re.compile(rf"keras\.({_KINDS})")
_CLASSES = re.compile(
    rf"keras\.({_KINDS}|optimizers\.schedules|layers|models|dtype_policies|random)"
    r"|keras\.src\.(models\.(functional|sequential)|ops\.\w+|dtype_policies\.\w+)"
)
_TOP = ("Sequential", "DTypePolicy", "DTypePolicyMap", "Variable", "KerasTensor")
# They run code, or open files, that their configuration names.
_DANGEROUS = ("Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")


def foreign(config: Any) -> list[str]:
    """The classes and functions in a description that are not Keras' own, and such as could run
    code; each once. Empty: making the model runs nothing but Keras."""
    return list(dict.fromkeys(_foreign(config)))


def _foreign(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _foreign(item)
    if not isinstance(value, dict):
        return
    if "class_name" in value and not _known(value):
        name = value.get("config") if value["class_name"] == "function" else value["class_name"]
        yield f"{value.get('module')}.{name}"
    if isinstance(value.get("vocabulary"), str):
        yield f"the file {value['vocabulary']}"
    for item in value.values():
        yield from _foreign(item)


def _known(described: dict[str, Any]) -> bool:
    name, module = described["class_name"], described.get("module")
    if name in _VALUES:
        return True
    if not isinstance(name, str) or not isinstance(module, str) or name in _DANGEROUS:
        return False
    if name == "function":
        return bool(_FUNCTIONS.fullmatch(module))
    return name in _TOP if module == "keras" else bool(_CLASSES.fullmatch(module))
