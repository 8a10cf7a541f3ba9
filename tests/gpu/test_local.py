"""One process on a GPU: the numbers of the CPU, in each precision, with XLA, several updates a
call, and bit for bit those of Keras' `fit`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contracts.running import SEED, Outcome, assert_same
from tests.dist.harness import Ranks
from tests.gpu.compare import error_of_change, same_numbers
from tests.gpu.training import beginning, equals_fit, updates, zoo

pytestmark = pytest.mark.gpu

# Dense and convolutional layers, statistics of batches, an LSTM with sparse gradients, masks.
MODELS = ("mlp", "batch_norm_cnn", "masked_lstm", "two_inputs_two_outputs")
# float32 is compared with float64: how far may the GPU be, in errors of the CPU's float32? Both add
# up the same products in another order; for convolutions cuDNN may use Winograd's algorithm, whose
# errors are some ten times as large. In TF32 a product has 13 bits less: 1e-3 in place of 1e-6.
FLOAT32 = {"wide": 10, "convolutional": 30}
# Of 16 bits, the rounding of activations, the same everywhere, is nearly all of the error.
HALF = 4


def test_float64_has_the_numbers_of_the_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    models: Callable[..., tuple[str, ...]],
) -> None:
    names = models(*MODELS)
    expected = truth(*names)
    (ours,) = on_device().run(zoo, names, deadline=240)
    seen(difference=same_numbers(ours, expected))


def test_random_numbers(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
) -> None:
    """Dropout draws the same masks: TensorFlow's stateless generators promise that."""
    expected = truth("transformer")
    (ours,) = on_device().run(zoo, ["transformer"], deadline=120)
    seen(difference=same_numbers(ours, expected))


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_without_tf32_is_as_exact_as_on_the_cpu(
    on_device: Callable[..., Ranks], on_cpu: Ranks, seen: Callable[..., None], name: str
) -> None:
    (start,) = on_cpu.run(beginning, name)
    (truth,) = on_cpu.run(updates, name, "float64", deadline=120)
    (cpu,) = on_cpu.run(updates, name, deadline=120)
    (gpu,) = on_device().run(updates, name, deadline=120)
    (with_tf32,) = on_device().run(updates, name, may_use_tf32=True, deadline=120)
    errors = {
        "error": error_of_change(gpu, truth, start),
        "of the CPU": error_of_change(cpu, truth, start),
        "with TF32": error_of_change(with_tf32, truth, start),
    }
    seen(**errors)
    assert errors["error"] <= FLOAT32[name] * errors["of the CPU"]
    assert errors["with TF32"] <= 0.02  # a product in TF32 is off by up to 0.001


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", FLOAT32)
def test_mixed_precision_is_as_exact_as_on_the_cpu(
    on_device: Callable[..., Ranks],
    on_cpu: Ranks,
    seen: Callable[..., None],
    name: str,
    precision: str,
) -> None:
    (start,) = on_cpu.run(beginning, name)
    (truth,) = on_cpu.run(updates, name, "float64", deadline=120)
    (cpu,) = on_cpu.run(updates, name, precision, deadline=120)
    (gpu,) = on_device().run(updates, name, precision, deadline=120)
    errors = {
        "error": error_of_change(gpu, truth, start),
        "of the CPU": error_of_change(cpu, truth, start),
    }
    seen(**errors)
    assert 1e-5 < errors["error"] <= HALF * errors["of the CPU"]
    scale = [
        {path: float(value) for path, value in outcome.slots if value.ndim == 0}
        for outcome in (gpu, cpu)
    ]
    assert scale[0] == scale[1]  # of updates, and of the loss: the same ones overflowed


def test_xla_has_the_numbers_of_the_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    models: Callable[..., tuple[str, ...]],
) -> None:
    names = models("mlp", "batch_norm_cnn", "skip_connections")
    expected = truth(*names)
    (ours,) = on_device().run(zoo, names, trainer={"xla": True}, deadline=240)
    seen(difference=same_numbers(ours, expected))


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "central_storage"])
def test_strategies_have_the_numbers_of_the_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    models: Callable[..., tuple[str, ...]],
    strategy: str,
) -> None:
    names = models("mlp", "batch_norm_cnn")
    expected = truth(*names)
    backend = {"name": "tf_distribute", "strategy": strategy}
    (ours,) = on_device().run(zoo, names, backend=backend, deadline=240)
    seen(difference=same_numbers(ours, expected))


def test_deterministic_runs_repeat_and_are_those_of_model_fit(
    on_device: Callable[..., Ranks], models: Callable[..., tuple[str, ...]]
) -> None:
    on_device().run(equals_fit, models("mlp", "batch_norm_cnn", "masked_lstm"), deadline=240)


def test_updates_in_one_call_have_the_bits_of_single_ones(
    on_device: Callable[..., Ranks], models: Callable[..., tuple[str, ...]]
) -> None:
    names = models("mlp", "masked_lstm")
    (single,), (several,) = (
        on_device().run(
            zoo,
            names,
            seed=SEED,
            trainer={"deterministic": True, "steps_per_call": updates_per_call},
            deadline=120,
        )
        for updates_per_call in (1, 3)
    )
    for name in names:
        assert_same(several[name], single[name])
