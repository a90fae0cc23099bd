"""A vision transformer of torchvision from eager to fused to compiled: what is fused, and how long each takes.

`python examples/torchvision_model.py`, or cell by cell in an editor that knows `# %%`. It needs torchvision and
matplotlib (`pip install "epigemm[bench]" torchvision`), downloads nothing, and writes torchvision_model.png. Without a
GPU the model is a small one, PyTorch's GEMM runs in all three, and the times say little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# %% The model. Its weights are random: times do not depend on them.
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils import benchmark
from torchvision.models import VisionTransformer, vit_b_16  # type: ignore[import-not-found, import-untyped, unused-ignore]

import epigemm

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
torch.manual_seed(0)
model: nn.Module = (
    vit_b_16(weights=None)
    if gpu
    else VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10
    )
)
model = model.to(device).eval()
images = torch.randn(64, 3, 224, 224, device=device) if gpu else torch.randn(8, 3, 32, 32)

# %% Eager: the model as it is.
with torch.no_grad():
    expected: Tensor = model(images)

# %% Fused: the same model in eager mode, in which each product is fused with what follows it.
fused = epigemm.fuse(model)
with torch.no_grad():
    torch.testing.assert_close(fused(images), expected, rtol=1e-3, atol=1e-3)
print(fused.fusion_report)

# %% Compiled: Inductor compiles the rest. On a CPU it would need a C++ compiler, so there another backend is used.
options: dict[str, Any] = {} if gpu else {"backend": "aot_eager"}
compiled = torch.compile(model, backend="epigemm", options=options)
with torch.no_grad():
    torch.testing.assert_close(compiled(images), expected, rtol=1e-3, atol=1e-3)


# %% Times. `fuse` may measure in its first calls which form of the model is faster: those are left out.
def milliseconds(function: Callable[[Tensor], Tensor]) -> float:
    """The median time of a call."""
    with torch.no_grad():
        for _ in range(20):
            function(images)
        timer = benchmark.Timer(
            "function(images)",
            globals={"function": function, "images": images},
            num_threads=torch.get_num_threads(),
        )
        return float(timer.blocked_autorange(min_run_time=1.0 if gpu else 0.1).median) * 1e3


times = {name: milliseconds(f) for name, f in (("eager", model), ("fused", fused), ("compiled", compiled))}
for name, time in times.items():
    print(f"{name}: {time:.2f} ms, {times['eager'] / time:.2f} times as fast as eager")

# %% The plot.
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
bars = axes.bar(list(times), list(times.values()))
axes.bar_label(bars, fmt="%.2f")
axes.margins(y=0.1)
axes.set_ylabel("time of a call in ms")
axes.set_title(
    f"{type(model).__name__}, batch of {len(images)}, {torch.cuda.get_device_name() if gpu else 'CPU'}"
)
figure.savefig("torchvision_model.png", dpi=150)
print("torchvision_model.png")
