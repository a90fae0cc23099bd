"""Find what the build needs: torch's headers, CUTLASS's headers, nvcc and nvJitLink.

Used by CMake (``python locate.py`` prints JSON) and by the build backend, so that both look in the same places and
accept the same versions. Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

Version = tuple[int, int]

TORCH_FLOOR: Version = (2, 10)
CUTLASS_FLOOR: Version = (4, 2)
NVCC_FLOOR: Version = (13, 0)

TORCH_REQUIREMENT = "torch==2.13.0"
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
NVJITLINK_REQUIREMENT = "nvidia-nvjitlink==13.0.*"
NVCC_REQUIREMENTS = tuple(
    f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
)


@dataclasses.dataclass(frozen=True)
class Found:
    """One requirement: where it is, or why there is none (`problem` is then one sentence)."""

    path: str = ""
    version: str = ""
    problem: str = ""
    install: str = ""

    def __bool__(self) -> bool:
        return not self.problem


def site_directories() -> Iterator[Path]:
    """Every site-packages in reach: this interpreter's, then those of the environment around an isolated build.

    pip hides the outer environment's packages from an isolated build but runs the same interpreter, so `sysconfig`
    still names them; `build` and uv make an environment of their own, and only VIRTUAL_ENV or the base
    interpreter lead to the outer one.
    """
    candidates = [entry for entry in sys.path if entry]
    candidates += [sysconfig.get_path(scheme) for scheme in ("platlib", "purelib")]
    candidates += site.getsitepackages()
    environment = os.environ.get("VIRTUAL_ENV")
    if environment:
        candidates += [str(path) for path in sorted(Path(environment).glob("lib*/python3*/site-packages"))]
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    candidates += [sysconfig.get_path(scheme, vars=base) for scheme in ("platlib", "purelib")]
    if site.ENABLE_USER_SITE:
        candidates.append(site.getusersitepackages())
    seen: set[Path] = set()
    for candidate in candidates:
        path = Path(candidate)
        if path not in seen and path.is_dir():
            seen.add(path)
            yield path


def _version_of(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else ""


def _numbers(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def torch_version(root: Path) -> str:
    """The version of the torch package in `root`, "" when `root` is no usable torch."""
    complete = (root / "include" / "torch" / "csrc").is_dir() and (root / "lib" / "libtorch_cpu.so").is_file()
    return _version_of(_read(root / "version.py"), r"""^__version__ = ['"]([^'"]+)""") if complete else ""


def cutlass_version(root: Path) -> str:
    """The version of the CUTLASS whose `include` folder lies in `root`, "" when there is none."""
    text = _read(root / "include" / "cutlass" / "version.h")
    parts = [_version_of(text, rf"^#define CUTLASS_{part} (\d+)") for part in ("MAJOR", "MINOR", "PATCH")]
    complete = all(parts) and (root / "tools" / "util" / "include").is_dir()
    return ".".join(parts) if complete else ""


def nvcc_version(nvcc: Path) -> str:
    """The release that `nvcc --version` prints, "" when it does not run."""
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return _version_of(done.stdout, r"release (\d+\.\d+)")


def find_torch(chosen: str = "") -> Found:
    """The first torch of at least TORCH_FLOOR: `chosen` (the package's folder) alone when given."""
    roots = [Path(chosen)] if chosen else [directory / "torch" for directory in site_directories()]
    versions = [(root, torch_version(root)) for root in roots]
    what = f"torch {_dotted(TORCH_FLOOR)} or later (its headers and libtorch_cpu.so)"
    return _choose(versions, TORCH_FLOOR, what, chosen, f"pip install {TORCH_REQUIREMENT}")


def find_cutlass(chosen: str = "") -> Found:
    """The first CUTLASS of at least CUTLASS_FLOOR: `chosen` (which holds `include` and `tools`) alone when given."""
    installed = (directory / "cutlass_library" / "source" for directory in site_directories())
    roots = [Path(chosen)] if chosen else list(installed)
    versions = [(root, cutlass_version(root)) for root in roots]
    what = f"CUTLASS {_dotted(CUTLASS_FLOOR)} or later (its headers)"
    return _choose(versions, CUTLASS_FLOOR, what, chosen, f"pip install --no-deps {CUTLASS_REQUIREMENT}")


def find_nvcc(chosen: str = "") -> Found:
    """The first nvcc of at least NVCC_FLOOR: `chosen` alone when given, else CUDACXX, PATH, /usr/local/cuda, PyPI's."""
    programs: list[str | None] = [chosen]
    if not chosen:
        programs = [
            shutil.which(os.environ.get("CUDACXX", "")),
            shutil.which("nvcc"),
            "/usr/local/cuda/bin/nvcc",
        ]
        programs += [str(directory / "nvidia" / "cu13" / "bin" / "nvcc") for directory in site_directories()]
    versions = [(Path(program), nvcc_version(Path(program))) for program in programs if program]
    requirements = " ".join(f"'{requirement}'" for requirement in NVCC_REQUIREMENTS)
    what = f"nvcc {_dotted(NVCC_FLOOR)} or later"
    return _choose(versions, NVCC_FLOOR, what, chosen, f"pip install {requirements}")


def find_nvjitlink(nvcc: str = "") -> Found:
    """The first nvJitLink of nvcc's major version: EPIGEMM_CUDA_LIBRARIES, PyPI's, the toolkit around nvcc.

    `path` is the folder that it is in.
    """
    chosen = os.environ.get("EPIGEMM_CUDA_LIBRARIES")
    folders = [Path(chosen), *Path(chosen).glob("nvidia/cu13/lib")] if chosen else []
    folders += [directory / "nvidia" / "cu13" / "lib" for directory in site_directories()]
    compiler = find_nvcc(nvcc)
    if compiler:
        top = Path(compiler.path).resolve().parent.parent
        folders += [top / "lib64", top / "lib"]
    folders += [Path("/usr/local/cuda/lib64")]
    name = f"libnvJitLink.so.{NVCC_FLOOR[0]}"
    for folder in folders:
        if (folder / name).is_file():
            return Found(path=str(folder), version=str(NVCC_FLOOR[0]))
    problem = f"nvJitLink {_dotted(NVCC_FLOOR)} or later ({name}): found none"
    return Found(problem=problem, install=f"pip install --no-deps '{NVJITLINK_REQUIREMENT}'")


def _choose(versions: list[tuple[Path, str]], floor: Version, what: str, chosen: str, install: str) -> Found:
    present = [(path, version) for path, version in versions if version]
    for path, version in present:
        if _numbers(version) >= floor:
            return Found(path=str(path), version=version, install=install)
    got = ", ".join(f"{version} in {path}" for path, version in present)
    got = f"found only {got}" if got else (f"there is none in {chosen}" if chosen else "found none")
    return Found(problem=f"{what}: {got}", install=install)


def missing_for_cuda(cutlass_dir: str = "", nvcc: str = "") -> list[str]:
    """The pip requirements that a build with CUDA kernels still lacks."""
    requirements = [] if find_nvcc(nvcc) else list(NVCC_REQUIREMENTS)
    if not find_nvjitlink(nvcc):
        requirements.append(NVJITLINK_REQUIREMENT)
    return requirements if find_cutlass(cutlass_dir) else [*requirements, CUTLASS_REQUIREMENT]


def main() -> None:
    """Print what was found as JSON: {"torch": {...}, "cutlass": {...}, "nvcc": {...}, "nvjitlink": {...}}."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--missing-for-cuda", action="store_true", help="print instead the pip requirements that are missing"
    )
    for name in ("torch-dir", "cutlass-dir", "nvcc"):
        parser.add_argument(f"--{name}", default="")
    arguments = parser.parse_args()
    if arguments.missing_for_cuda:
        print(*missing_for_cuda(arguments.cutlass_dir, arguments.nvcc))
        return
    found = {
        "torch": find_torch(arguments.torch_dir),
        "cutlass": find_cutlass(arguments.cutlass_dir),
        "nvcc": find_nvcc(arguments.nvcc),
        "nvjitlink": find_nvjitlink(arguments.nvcc),
    }
    print(json.dumps({name: dataclasses.asdict(item) for name, item in found.items()}, indent=2))


if __name__ == "__main__":
    main()
