"""Check an installed epigemm: the module loads under this torch, is what the build promised, and computes.

Usage: `python check_installed.py [--cuda]`
"""

from __future__ import annotations

import argparse

import torch

import epigemm


def main() -> None:
    """Raise AssertionError when something is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--cuda", action="store_true", help="the build must have CUDA kernels for the default GPUs"
    )
    arguments = parser.parse_args()
    info = epigemm.build_info()
    print(f"torch {torch.__version__} loads {epigemm.__file__}: {info}")
    if arguments.cuda:
        assert info["cuda"], "built without CUDA kernels"
        assert info["elementwise_architectures"] == "80;90", info["elementwise_architectures"]
        assert info["gemm_architectures"] == "90a", info["gemm_architectures"]
        assert info["gemm_kernels"] > 0, "built without GEMM kernels"
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    expected = torch.relu(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(epigemm.linear_relu(x, weight, bias), expected)


if __name__ == "__main__":
    main()
