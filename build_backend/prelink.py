"""Link one built-in epilogue into the open kernels: a zip file with the machine code of each under its symbol.

Run by CMake (cmake/EpigemmPrelink.cmake). The linking is the package's own, which is not built yet: its modules are
imported without the package around them, and so without torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "python" / "epigemm"
REGISTRY = PACKAGE.parents[1] / "csrc" / "epilogue" / "registry.def"
ARCHITECTURE = "sm_90a"
OF_PAIRS = "gated_silu"
"""Linked into the kernels of pairs of products for their code to be checked: the wheel has them without an epilogue."""


def import_parts() -> None:
    """Let modules of the package be imported without the package."""
    for name in ("epigemm", "epigemm.epilogues", "epigemm.epilogues.tracer", "epigemm.linker"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(PACKAGE.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def write_sources(folder: Path) -> None:
    """The functors of registry.def and of epigemm/epilogues/formulas.py, for each type of results.

    Prints the names of the latter for CMake, and behind them that of `OF_PAIRS`.
    """
    from epigemm.epilogues.formulas import FORMULAS, PRELINKED
    from epigemm.epilogues.tracer.source import functor_text, kernel_functions, named_functor

    folder.mkdir(parents=True, exist_ok=True)
    lines = re.findall(r"^EPIGEMM_EPILOGUE\((\w+), (\w+), PRELINKED\)", REGISTRY.read_text(), re.MULTILINE)
    functors = dict(lines)
    for name in (*functors, *PRELINKED, OF_PAIRS):
        formula = FORMULAS[name]
        elements = [2 if is_folded else 1 for is_folded in formula.folded]
        for suffix, apply in (("", "apply"), ("_float16", "apply_float16"), ("_bfloat16", "apply_bfloat16")):
            parts = ("operand", apply, "apply_double", "slope", "slope_double")
            functions = kernel_functions(formula.program, formula.kinds, elements, parts)
            include = f'#include "epilogue/{name if name in functors else "primitives"}.h"'
            functor = (
                named_functor(functors[name])
                if name in functors
                else functor_text(formula.program, formula.kinds)
            )
            text = f'#include "open/functor.h"\n{include}\n\n{functor}\n{functions}'
            file = folder / f"{name}{suffix}.cu"
            if not file.is_file() or file.read_text() != text:
                file.write_text(text)
    print(*PRELINKED, OF_PAIRS, sep=";", end="")


def linker() -> Callable[[bytes, bytes, str], bytes]:
    """Links (kernel's code, functor's code, symbol) to machine code."""
    from epigemm.linker.libraries import link, nvjitlink

    library = nvjitlink()
    return lambda kernel, functor, symbol: link(kernel, functor, symbol, ARCHITECTURE, library=library)


def wanted(symbols: list[str], *, reads_matrices: bool, is_of_pairs: bool = False) -> list[str]:
    """The kernels that calls on Hopper take, but for those of 8 bits and of groups, which are linked at first use.

    The mma.sync kernels (`sm80`) are for other GPUs.

    The epilogue alone and its derivative are among them where they are not compiled with the package: where it reads a
    matrix. Those of pairs of products stand by themselves: calls take none of them yet.
    """
    alone = re.compile("epigemm_open_(elementwise|derivative)_")
    return [
        symbol
        for symbol in symbols
        if "_sm80_" not in symbol
        and not re.search("_e[45]m[23]_|_grouped", symbol)
        and symbol.endswith("_pair") == is_of_pairs
        and (reads_matrices or not alone.match(symbol))
    ]


def write(file: Path, cubins: dict[str, bytes]) -> None:
    """The same bytes for the same kernels."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for symbol, cubin in cubins.items():
            archive.writestr(zipfile.ZipInfo(symbol), cubin, zipfile.ZIP_DEFLATED, compresslevel=9)


def main() -> None:
    """Link and write."""
    import_parts()
    if sys.argv[1:2] == ["--write-sources"]:
        write_sources(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads-matrices", action="store_true", help="the functor does")
    parser.add_argument("--pairs", action="store_true", help="the kernels are those of pairs of products")
    parser.add_argument("--ir", type=Path, required=True, help="the folder of the open kernels' code")
    parser.add_argument("--out", type=Path, required=True, help="the zip file")
    parser.add_argument("functor", type=Path, help="its code for results of 32 bits")
    parser.add_argument("functor_float16", type=Path, help="for results of fp16")
    parser.add_argument("functor_bfloat16", type=Path, help="for results of bf16")
    given = parser.parse_args()
    index: dict[str, str] = json.loads((given.ir / "index.json").read_text())
    functors = {
        "_bfloat16": given.functor_bfloat16.read_bytes(),
        "_float16": given.functor_float16.read_bytes(),
        "": given.functor.read_bytes(),
    }
    kernels = {file: (given.ir / file).read_bytes() for file in dict.fromkeys(index.values())}
    link = linker()
    cubins = {
        symbol: link(
            kernels[index[symbol]], next(code for part, code in functors.items() if part in symbol), symbol
        )
        for symbol in wanted(list(index), reads_matrices=given.reads_matrices, is_of_pairs=given.pairs)
    }
    write(given.out, cubins)


if __name__ == "__main__":
    main()
