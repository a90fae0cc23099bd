"""Print this machine's GPU architectures as EPIGEMM_ARCHITECTURES takes them ("90a", "80;86"), or nothing."""

from __future__ import annotations

import subprocess


def architecture(capability: str) -> str:
    """The architecture to build for a GPU of that compute capability ("9.0" -> "90a"), "" when it is too old.

    Hopper gets the variant with the fused GEMM kernels, every other GPU the elementwise kernels.
    """
    number = capability.strip().replace(".", "")
    if not number.isdigit() or int(number) < 80:
        return ""
    return "90a" if number == "90" else number


def main() -> None:
    """Ask the driver; a machine without one has no GPU."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return
    architectures = {architecture(line) for line in done.stdout.splitlines()} - {""}
    print(";".join(sorted(architectures)))


if __name__ == "__main__":
    main()
