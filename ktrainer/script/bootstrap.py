"""Create the Trainer of a script that makes none, from the command line of `ktrainer run`."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ktrainer.config import command_line
from ktrainer.errors import SetupError
from ktrainer.runtime.garbage_collection import paused_collection
from ktrainer.runtime.monkeypatching import Replacements, wrap_import
from ktrainer.script.shared_folders import share_folders

if TYPE_CHECKING:
    from ktrainer.script.routing import Routing

_BACKEND = "KERAS_BACKEND"
_WITH_KERAS = (
    "backends", "callbacks", "checkpoint", "data", "elastic", "steps", "trainer", "training"
)  # fmt: skip
_routing: Routing | None = None
_replaced = Replacements()
_first = True
_numpy_seeds = random.Random()  # for NumPy's generators without a seed, such as default_rng()


def install(rank: int, seed: int | None, horovod: bool, marks: Path | None = None) -> None:
    """Route training through a Trainer as soon as the script imports TensorFlow or Keras.

    The Trainer is created then, before TensorFlow runs anything: it chooses devices.

    Args:
        rank: the rank of this process.
        seed: seed of all random numbers, the same on all ranks; None does not seed them.
        horovod: whether the script imports Horovod.
        marks: a folder of the launch, for several ranks; see `share_folders`.
    """
    global _first
    _first = rank == 0
    command_line.launcher_seed = seed
    if marks is not None:
        share_folders(marks, rank, _replaced)
        _AfterImport("tf_keras", _refuse_keras_2)
        if not _first:
            _AfterImport("wandb", _disable_wandb)
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if seed is not None:
        random.seed(seed)
        _numpy_seeds.seed(seed)
        around = partial(_untouched_seed, random.getstate())
        _AfterImport("numpy", partial(_seed_numpy, seed))
        _AfterImport("scipy.stats", lambda: None, around=around)
        _AfterImport("torch", partial(_seed_torch, seed))
    start = partial(_start, seed, horovod)
    _AfterImport("tensorflow", partial(_unless_importing, "keras", start), around=around)
    start = partial(_unless_importing, "tensorflow", start)
    _AfterImport("keras", start, before=_on_tensorflow, around=around)
    sys.meta_path.insert(0, _KerasFirst())


def watch(rank: int, ranks: int) -> None:
    """Warn once if a script that is not routed trains on several ranks without a Trainer."""
    global _first
    _first = rank == 0
    if ranks > 1:
        _AfterImport("keras", partial(_watch_fit, ranks))


def before_import(report: Callable[[list[str]], None]) -> None:
    """Call `report` once when TensorFlow or Keras is about to be imported, with the names of the
    environment variables that have changed since now, and "random's state" if that has: the import
    draws from it. Not if one of them is imported."""
    given, state, modules = dict(os.environ), random.getstate(), ("tensorflow", "keras")

    @functools.cache
    def act() -> None:
        names = given.keys() | os.environ.keys()
        changed = sorted(name for name in names if given.get(name) != os.environ.get(name))
        report(changed + ["random's state"] * (random.getstate() != state))

    if not any(module in sys.modules for module in modules):
        for module in modules:
            _AfterImport(module, lambda: None, before=act)


def _watch_fit(ranks: int) -> None:
    import keras

    replaced = Replacements()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fit(*args: Any, **kwargs: Any) -> Any:
            from ktrainer.distributed import is_open

            replaced.close()
            if not is_open():
                say(
                    f"Model.fit was called, and no Trainer has been made: each of {ranks} ranks "
                    "trains by itself. Call `fit` of a Trainer; or take Trainer and load_config "
                    "out of the script, and Model.fit is routed"
                )
            return original(*args, **kwargs)

        return fit

    replaced.wrap(keras.Model, "fit", make)


def _refuse_keras_2() -> None:
    """Refuse training by Keras 2, which is not routed: each rank would train by itself."""
    model = import_module("tf_keras").Model

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> NoReturn:
            raise SetupError(
                "tf_keras is Keras 2, which ktrainer does not know: each rank would train by "
                "itself. Import keras, which is Keras 3, instead, and unset TF_USE_LEGACY_KERAS; "
                "or run one process, without `ktrainer run -n`"
            )

        return train

    for name in ("fit", "train_on_batch"):
        _replaced.wrap(model, name, refuse)


def _disable_wandb() -> None:
    """Disable the runs that the script starts on this rank: rank 0 has one."""

    def disabled(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("ktrainer."):  # logging.wandb, of a rank that has become rank 0
                return original(*args, **kwargs)
            return original(*args, **{**kwargs, "mode": "disabled"})

        return init

    _replaced.wrap(import_module("wandb"), "init", disabled)


def uninstall() -> None:
    """Undo `install`."""
    global _routing
    ours = (_AfterImport, _KerasFirst)
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, ours)]
    if _routing is not None:
        _routing.close()
        _routing = None
    _replaced.close()
    command_line.launcher_seed = None


def say(text: str) -> None:
    """Print a line to the standard error of rank 0."""
    if _first:
        print(f"ktrainer run: {text}", file=sys.stderr, flush=True)


def _unless_importing(other: str, start: partial[None]) -> None:
    # TensorFlow and Keras import one another: the outer import ends last.
    if not _is_importing(other):
        start()


def _start(seed: int | None, horovod: bool) -> None:
    global _routing
    if _routing is not None:
        return
    from ktrainer.config.command_line import give_words, launcher_words
    from ktrainer.runtime.tensorflow_setup import note_seed
    from ktrainer.trainer import Trainer

    with _kept_random_states():
        # Without a seed on the command line, the script's own applies, if any.
        trainer = Trainer.from_cli(argv=(), defaults={"seed": None})
        give_words(launcher_words)  # again, for a Trainer of the script's own
        if seed is not None:
            import keras

            keras.utils.set_random_seed(seed)
            note_seed()
    from ktrainer.script.routing import Routing

    _routing = Routing(trainer)
    if horovod:
        say(
            "the script imports Horovod, which ktrainer does not need: delete hvd.init(), "
            "hvd.DistributedOptimizer, hvd.callbacks and what depends on hvd.rank() or hvd.size(), "
            "such as a scaled learning rate"
        )


def _seed_numpy(seed: int) -> None:
    import numpy as np
    from numpy.random import bit_generator

    np.random.seed(seed)
    vars(bit_generator)["randbits"] = _numpy_seeds.getrandbits


def _seed_torch(seed: int) -> None:
    sys.modules["torch"].manual_seed(seed)


@contextmanager
def _untouched_seed(seeded: object) -> Iterator[None]:
    """Let the block take no seeds of NumPy's generators, nor numbers from `random` if it is as it
    was seeded: the import of Keras does (scipy.stats, and rich), which a fork of a restart has
    behind it."""
    keep, numpy_seeds = random.getstate() == seeded, _numpy_seeds.getstate()
    try:
        yield
    finally:
        _numpy_seeds.setstate(numpy_seeds)
        if keep:
            random.setstate(seeded)  # type: ignore[arg-type]


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Restore the random states of Python and NumPy after the block: the script may have seeded
    them."""
    import numpy as np

    python, numpy, seeds = random.getstate(), np.random.get_state(), _numpy_seeds.getstate()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        _numpy_seeds.setstate(seeds)


def _on_tensorflow() -> None:
    asked = os.environ.get(_BACKEND)
    if asked not in (None, "tensorflow"):
        say(f"the script asks for Keras on {asked}; it runs on TensorFlow")
    os.environ[_BACKEND] = "tensorflow"


class _AfterImport(MetaPathFinder):
    """Calls `before()` before a module is executed, and `action()` after it; in between no garbage
    is collected, and what there is after TensorFlow's or Keras' import is left out from then on.

    Args:
        module: the full name.
        action: called once.
        before: called once.
        around: makes a context of the execution.
    """

    def __init__(
        self,
        module: str,
        action: Callable[[], None],
        before: Callable[[], None] = lambda: None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module, self._action, self._before = module, action, before
        self._around = around
        if module in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        return wrap_import(self, name, path, target, self._execution)

    @contextmanager
    def _execution(self) -> Iterator[None]:
        self._before()
        freeze = self._module in ("tensorflow", "keras")  # at others there may be models
        with paused_collection(freeze), self._around():
            yield
        self._action()


class _KerasFirst(MetaPathFinder):
    """Imports Keras before a script's first module of ktrainer that would: `_start`, which runs at
    the end of that import, imports much of ktrainer and would find that module half imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "ktrainer" or rest.partition(".")[0] not in _WITH_KERAS:
            return None
        sys.meta_path.remove(self)
        import_module("keras")
        module = sys.modules.get(name)
        if module is None:
            return None
        loader = _Imported(module)
        module.__spec__ = None  # which importlib would take, and execute the module again
        return ModuleSpec(name, loader)


class _Imported(Loader):
    """Loads a module that was imported while it was being found."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _is_importing(name: str) -> bool:
    """Return whether a module is being imported."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
