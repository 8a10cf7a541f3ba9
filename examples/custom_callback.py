"""Callbacks of your own: for steps, for gradients, for logs, and by name from a config.

    python examples/custom_callback.py
    ktrainer run -n 2 examples/custom_callback.py backend=data_parallel \\
        'callbacks={goal: {type: stop_at, metric: val_accuracy, value: 0.95}}'

Every rank runs every callback, and logs of epochs are the same on all of them, so a decision
made from these logs is the same everywhere.
"""

from typing import Any

from ktrainer import Callback, Trainer, rank_zero_only, register

# isort: split
import keras
import tensorflow as tf
from data import data_folder
from digits import build_model, load_split
from keras import ops

# Over ktrainer's own; a file and key=value win.
DEFAULTS = {"trainer": {"epochs": 5}, "logging": {"every": "10ba"}}


@register("stop_at")
class StopAt(Callback):
    """Ends training once a metric of an epoch is at least `value`."""

    def __init__(self, metric: str = "val_accuracy", value: float = 0.95) -> None:
        super().__init__()
        self.metric, self.value = metric, value

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if (logs or {}).get(self.metric, 0.0) >= self.value:
            self.request_stop(f"{self.metric} has reached {self.value}")


class CentralizeGradients(Callback):
    """Takes the mean out of each gradient (Yong et al. 2020, "Gradient Centralization").

    The method becomes part of the compiled step. It sees gradients that are already summed over
    ranks, and must treat them alike on every rank: no random numbers here.
    """

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return [self.centralize(gradient) for gradient in gradients]

    @staticmethod
    def centralize(gradient: Any) -> Any:
        if gradient is None or isinstance(gradient, tf.IndexedSlices) or gradient.shape.rank < 2:
            return gradient  # no gradient, rows of an embedding, a bias
        axes = list(range(gradient.shape.rank - 1))
        return gradient - ops.mean(gradient, axis=axes, keepdims=True)


class BestStep(Callback):
    """Remembers the step with the lowest loss; what it knows is kept in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.loss = 0, float("inf")

    def on_log(self, step: int, logs: dict[str, float]) -> None:
        if logs["loss"] < self.loss:  # of all ranks; every `logging.every`
            self.step, self.loss = step, logs["loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.loss = state["step"], state["loss"]


@rank_zero_only
def report(best: BestStep, history: keras.callbacks.History) -> None:
    print(f"lowest loss {best.loss:.4g} at step {best.step}, in {len(history.epoch)} epochs")


def main() -> None:
    best = BestStep()
    _, argv = data_folder()  # not needed: the digits come with scikit-learn
    trainer = Trainer.from_cli([CentralizeGradients(), best], argv=argv, defaults=DEFAULTS)
    train, validation = load_split()
    report(best, trainer.fit(build_model, train, validation_data=validation))


if __name__ == "__main__":
    main()
