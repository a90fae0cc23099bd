"""The drop-in models of examples/kernelbench against the plain PyTorch originals beside them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.examples import EXAMPLES, load
from tests.support.pieces import road

__all__ = ["road"]

FOLDER = EXAMPLES / "kernelbench"
EXPECTED = {
    "gemm_add_relu",
    "gemm_sigmoid_scaling_residual_add",
    "gemm_scale_batch_norm",
    "gemm_relu_divide",
    "sigmoid",
}
FILES = sorted(path for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="examples are not at hand")
problems = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

# Constructor arguments, and M and K, at the earlier size: 128; 1024 -> 512, and 16 x 16384.
EARLIER: dict[str, tuple[tuple[Any, ...], tuple[int, int]]] = {
    "gemm_add_relu": ((1024, 512, (512,)), (128, 1024)),
    "gemm_sigmoid_scaling_residual_add": ((1024, 512, 2.0), (128, 1024)),
    "gemm_scale_batch_norm": ((1024, 512, (512,)), (128, 1024)),
    "gemm_relu_divide": ((1024, 512, 2.0), (128, 1024)),
    "sigmoid": ((), (16, 16384)),
}


def pair(path: Path, device: torch.device | str = "cpu") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The original and ours, made under the same seed, and an input: U[0,1) drawn on the CPU and moved."""
    module = load(path)
    arguments, shape = EARLIER[path.stem]
    models = []
    for kind in (module.Model, module.ModelNew):
        torch.manual_seed(42)
        models.append(kind(*arguments).to(device))
    return models[0], models[1], torch.rand(*shape).to(device)


def test_all_problems_are_there() -> None:
    assert {path.stem for path in FILES} >= EXPECTED


@problems
def test_same_seed_same_parameters(path: Path) -> None:
    """And what is drawn after the model is made does not depend on which model it was."""
    module, (arguments, _) = load(path), EARLIER[path.stem]
    states, draws = [], []
    for kind in (module.Model, module.ModelNew):
        torch.manual_seed(7)
        model = kind(*arguments)
        states.append(model.state_dict())
        draws.append(torch.rand(4))
    assert list(states[0]) == list(states[1]) and torch.equal(*draws)
    torch.testing.assert_close(*states, rtol=0, atol=0)


@problems
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_agree(path: Path, training: bool, device: torch.device) -> None:
    """fp32, atol = rtol = 1e-4, over several batches: running statistics agree as well."""
    original, ours, x = pair(path, device)
    original.train(training), ours.train(training)
    for batch in (x, 1 - x, x * 8 - 4):
        with torch.no_grad():
            torch.testing.assert_close(ours(batch), original(batch), rtol=1e-4, atol=1e-4)
    for (name, mine), (_, other) in zip(ours.named_buffers(), original.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, msg=name)


@problems
def test_gradients_agree(path: Path) -> None:
    original, ours, x = pair(path)
    # Not output.sum(): BatchNorm makes the gradients of that vanish, and noise would be compared with noise.
    upstream = torch.randn(original(x).shape)
    for model in (original, ours):
        model(x.requires_grad_()).backward(upstream)
    for (name, mine), (_, other) in zip(ours.named_parameters(), original.named_parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        scale = float(other.grad.abs().max()) + 1
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


def real_sizes() -> list[tuple[Path, str]]:
    """Each problem with the name of each of its real sizes ("" where the module names none)."""
    found: list[tuple[Path, str]] = []
    for path in FILES:
        names = [name for name in vars(load(path)) if name.startswith("REAL")]
        found += [(path, name) for name in names or [""]]
    return found


def inputs_and_arguments(module: ModuleType, size: str) -> tuple[list[torch.Tensor], list[Any]]:
    """The harness's own functions, at the size asked for."""
    sizes = [getattr(module, size)] if size else []
    return module.get_inputs(*sizes), module.get_init_inputs(*sizes)


def assert_close_by_rows(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """1e-4, in parts: 6.4 GB of output need no masks of the same size."""
    assert actual.shape == expected.shape
    for part in range(0, expected.shape[0], 512):
        torch.testing.assert_close(
            actual[part : part + 512], expected[part : part + 512], rtol=1e-4, atol=1e-4
        )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("path", "size"), real_sizes(), ids=lambda v: v.stem if isinstance(v, Path) else v)
def test_real_sizes(path: Path, size: str) -> None:
    """fp32 against eager fp32 at `highest`, in eval and in training mode, five seeds.

    The first seed draws everything on the CPU and moves it, as the public harness does; the others draw on the GPU.
    Both modes run on the same model, eval first: training mode changes the running statistics.
    """
    module = load(path)
    assert torch.get_float32_matmul_precision() == "highest"
    for seed in (42, 0, 1, 2, 3):
        where = torch.device("cpu" if seed == 42 else "cuda")
        torch.manual_seed(seed)
        with where:
            inputs, arguments = inputs_and_arguments(module, size)
        inputs = [tensor.cuda() for tensor in inputs]
        models = []
        for kind in (module.Model, module.ModelNew):
            torch.manual_seed(seed)
            with where:
                models.append(kind(*arguments).cuda())
        for training in (False, True):
            expected, actual = run_both(models, inputs, training)
            assert_close_by_rows(actual, expected)
        buffers = zip(models[1].named_buffers(), models[0].named_buffers(), strict=True)
        for (name, mine), (_, other) in buffers:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, msg=name)
        del models, inputs, expected, actual


def run_both(
    models: list[nn.Module], inputs: list[torch.Tensor], training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The original's and our output."""
    with torch.no_grad():
        expected, actual = (model.train(training)(*inputs) for model in models)
    return expected, actual


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("path", "size"), real_sizes(), ids=lambda v: v.stem if isinstance(v, Path) else v)
def test_signed_inputs_at_real_sizes(path: Path, size: str) -> None:
    """U[0,1) hides what relu and sigmoid do to the rest: the same models on N(0, 4)."""
    module = load(path)
    torch.manual_seed(7)
    with torch.device("cuda"):
        inputs, arguments = inputs_and_arguments(module, size)
        original, ours = module.Model(*arguments), module.ModelNew(*arguments)
    ours.load_state_dict(original.state_dict())
    inputs = [tensor.normal_(std=2.0) for tensor in inputs]
    expected, actual = run_both([original, ours], inputs, training=False)
    assert_close_by_rows(actual, expected)
