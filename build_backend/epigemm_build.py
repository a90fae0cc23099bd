"""The PEP 517 backend: scikit-build-core, plus build requirements that depend on what the user already has.

An isolated build (pip's default) would download its own torch just for a few headers. This backend asks for torch only
when none that is new enough is found around the build, and for CUTLASS only when the CUDA kernels are going to be
built and its headers are nowhere.
"""

from __future__ import annotations

import os
import re
import shlex

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import locate

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, list[str] | str]


def _definitions(config_settings: ConfigSettings | None) -> dict[str, str]:
    """The CMake definitions of this build, from everywhere scikit-build-core takes them."""
    settings = config_settings or {}
    arguments = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    for key in ("cmake.args", "skbuild.cmake.args"):
        value = settings.get(key, [])
        arguments += value.split(";") if isinstance(value, str) else value
    found = dict(re.findall(r"^-D\s*(\w+)(?::\w+)?=(.*)$", "\n".join(arguments), re.MULTILINE))
    for definition in os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";"):
        name, _, value = definition.partition("=")
        found[name] = value
    for key, value in settings.items():
        match = re.fullmatch(r"(?:skbuild\.)?cmake\.define\.(\w+)", key)
        if match and isinstance(value, str):
            found[match.group(1)] = value
    return found


def _missing_requirements(config_settings: ConfigSettings | None) -> list[str]:
    definitions = _definitions(config_settings)
    cuda = definitions.get("EPIGEMM_CUDA", "AUTO").upper()
    nvcc = definitions.get("CMAKE_CUDA_COMPILER", "")
    wanted = cuda in ("ON", "1", "TRUE", "YES", "Y") or (cuda == "AUTO" and bool(locate.find_nvcc(nvcc)))
    requirements: list[str] = []
    if not locate.find_torch(definitions.get("EPIGEMM_TORCH_DIR", "")):
        requirements.append(locate.TORCH_REQUIREMENT)
    if wanted:
        requirements += locate.missing_for_cuda(definitions.get("EPIGEMM_CUTLASS_DIR", ""), nvcc)
    return requirements


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """scikit-build-core's requirements (CMake, Ninja) and those of ours that are not installed."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_missing_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """As for a wheel."""
    return [*_build.get_requires_for_build_editable(config_settings), *_missing_requirements(config_settings)]
