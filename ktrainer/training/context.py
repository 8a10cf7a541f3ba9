"""The context of one call: its configuration, plan, ranks, backend and run folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktrainer.errors import ModelError
from ktrainer.runtime.run_folder import of_fit, open_run_folder

if TYPE_CHECKING:
    import keras

    from ktrainer.backends.backend import Backend
    from ktrainer.config import Config
    from ktrainer.distributed import World
    from ktrainer.plan.run_plan import Plan
    from ktrainer.state.train_state import TrainState
    from ktrainer.steps import Program, StepOptions


class RunFolder:
    """The folder of a Trainer's runs, which rank 0 makes when it is first needed.

    Attributes:
        path: None until then.
    """

    path: Path | None = None

    def open(self, config: Config, world: World) -> Path:
        """The folder; all ranks call this together the first time."""
        if self.path is None:
            self.path = open_run_folder(config, world)
        return self.path


@dataclass(frozen=True)
class RunContext:
    """Configuration and resources of one call of `fit`, `evaluate` or `predict`.

    Attributes:
        config: the configuration with the arguments of the call.
        plan: what it means here.
        world: the ranks.
        backend: how steps run on this rank.
        folder: of the run.
    """

    config: Config
    plan: Plan
    world: World
    backend: Backend
    folder: RunFolder

    @property
    def run_dir(self) -> Path:
        """The run's folder; all ranks ask for it together the first time."""
        return self.folder.open(self.config, self.world)

    def checkpoint_dir(self, state: TrainState) -> Path:
        """The folder of a `fit`'s checkpoints.

        Each `fit` of a script has a folder of its own (`checkpoints`, `checkpoints-2`, ...), so
        that a script that trains in several parts resumes in the right one.
        """
        return self._checkpoint_dir(state, state.fits)

    def later_fits(self, state: TrainState) -> Iterator[tuple[int, Path]]:
        """Numbers and folders of the next calls of `fit` of the script that have saved, before this
        one is run again."""
        for fit in itertools.count(state.fits + 1):
            path = self._checkpoint_dir(state, fit)
            if not path.exists():
                return
            yield fit, path

    def later_fit_began(self, state: TrainState) -> bool:
        """Whether the next `fit` of the script has saved, before this one is run again."""
        return any(self.later_fits(state))

    def _checkpoint_dir(self, state: TrainState, fit: int) -> Path:
        path = Path(self.config.checkpoint.dir or self.run_dir / "checkpoints").expanduser()
        return of_fit(path, fit, state.inside)

    @property
    def has_common_logs(self) -> bool:
        """Whether callbacks get the logs of all ranks after each batch. Ranks may join."""
        return self.config.logging.batch_logs == "all" and self.world.size > 1

    def program_for(self, model: Any, options: StepOptions | None = None) -> Program:
        """The compiled steps of `model`: those of an earlier call, unless it was compiled again.

        Args:
            options: how steps run; None for those of its last `fit`, or of the configuration.
        """
        from ktrainer.steps.local_layers import set_local_layers
        from ktrainer.steps.powersgd import set_powersgd
        from ktrainer.steps.program_cache import cached_program, forget_programs
        from ktrainer.training.fit_settings import refuse_stateful_layers, step_options
        from ktrainer.verify.update_split import split_of

        refuse_stateful_layers(model, split_of(self.config, self.plan))
        set_local_layers(model, getattr(self.config.backend, "local_layers", ()))
        low_rank = getattr(self.config.backend, "low_rank", None) if self.world.size > 1 else None
        if options is not None and set_powersgd(model, low_rank):
            forget_programs(model)
        return cached_program(
            model,
            options or step_options(self.config),
            [self.backend, self.world.rank, self.world.size],
            self.backend.prepare,
            any_options=options is None,
        )


def resolve_model(backend: Backend, model: Any) -> keras.Model:
    """The model that was given, or that a given function makes.

    Raises:
        ModelError: it is none.
    """
    import keras

    if not isinstance(model, keras.Model) and callable(model):
        model = backend.build_model(model)
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"expected a keras.Model, or a function that returns one, got {type(model)}; pass "
            "keras.Sequential(...), or build_model without calling it"
        )
    return model


def check_nested(context: RunContext, outer: keras.Model | None, model: Any) -> None:
    """Refuse a `fit` of `model` in a callback of the `fit` of `outer`.

    Raises:
        ModelError: it cannot run there.
    """
    where = "a callback of fit calls fit"
    if context.world.heals:
        raise ModelError(
            f"{where}, which cannot be healed: ranks that join would not know of it. Set "
            "world.heal=off, or train the other model before or after this one."
        )
    if model is outer and context.backend.name == "pipeline":
        raise ModelError(
            f"{where} for the same model, whose stages are being trained. Train it before or "
            "after this fit, or make another model."
        )
