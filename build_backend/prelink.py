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
ARCHITECTURE = "sm_90a"


def linker() -> Callable[[bytes, bytes, str], bytes]:
    """Links (kernel's code, functor's code, symbol) to machine code."""
    for name in ("epigemm", "epigemm.linking"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(PACKAGE.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from epigemm.linking.libraries import nvjitlink
    from epigemm.linking.nvjitlink import link

    library = nvjitlink()
    return lambda kernel, functor, symbol: link(kernel, functor, symbol, ARCHITECTURE, library=library)


def wanted(symbols: list[str], *, reads_matrices: bool) -> list[str]:
    """The kernels that calls on Hopper take.

    The epilogue alone and its derivative are among them where they are not compiled with the package: where it reads a
    matrix. Without one no kernel that loads it by TMA is.
    """
    alone = re.compile("epigemm_open_(elementwise|derivative)_")
    return [
        symbol
        for symbol in symbols
        if reads_matrices or not (symbol.endswith("_matrix") or alone.match(symbol))
    ]


def write(file: Path, cubins: dict[str, bytes]) -> None:
    """The same bytes for the same kernels."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for symbol, cubin in cubins.items():
            archive.writestr(zipfile.ZipInfo(symbol), cubin, zipfile.ZIP_DEFLATED, compresslevel=9)


def main() -> None:
    """Link and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True, help="the functor's")
    parser.add_argument("--ir", type=Path, required=True, help="the folder of the open kernels' code")
    parser.add_argument("--out", type=Path, required=True, help="the zip file")
    parser.add_argument("functor", type=Path, help="its code for results of 32 bits")
    parser.add_argument("functor_16", type=Path, help="and for results of 16 bits")
    given = parser.parse_args()
    index: dict[str, str] = json.loads((given.ir / "index.json").read_text())
    functor, functor_16 = given.functor.read_bytes(), given.functor_16.read_bytes()
    kernels = {file: (given.ir / file).read_bytes() for file in dict.fromkeys(index.values())}
    link = linker()
    reads_matrices = re.search(r"\bmatrix\(", given.header.read_text()) is not None
    cubins = {
        symbol: link(kernels[index[symbol]], functor_16 if "float16" in symbol else functor, symbol)
        for symbol in wanted(list(index), reads_matrices=reads_matrices)
    }
    write(given.out, cubins)


if __name__ == "__main__":
    main()
