"""The native modules: what happens where one of them does not load."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_without_the_entry_torch_computes_and_it_is_said() -> None:
    code = """
        import sys, warnings
        sys.modules["epigemm._entry"] = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import epigemm
        assert ["_entry does not load" in str(each.message) for each in caught].count(True) == 1
        import torch
        x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, requires_grad=True)
        found = epigemm.linear_relu(x, weight, bias)
        torch.testing.assert_close(found, torch.relu(torch.nn.functional.linear(x, weight, bias)))
        found.sum().backward()
        assert bias.grad is not None
        explanation = epigemm.explain("linear_silu", x, weight, bias)
        assert explanation.path == "reference" and "_entry does not load" in str(explanation)
        try:
            epigemm.linear_relu(x, weight, bias.detach(), strict=True)
        except RuntimeError as error:
            assert "_entry does not load" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
