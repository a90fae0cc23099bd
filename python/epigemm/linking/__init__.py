"""Links an epilogue into kernels that were compiled with their epilogue left open.

The functor's source goes through NVRTC, its code and an open kernel's through nvJitLink; the machine code is kept on
disk. Neither library is loaded, or looked for, before a kernel has to be made.
"""

from __future__ import annotations

from epigemm.linking.cubins import Job, build_cubins, cubin, find, key_for
from epigemm.linking.errors import CompileError, LibrariesMissingError, LinkError, LinkingError
from epigemm.linking.exchange import export_cache, import_cache
from epigemm.linking.ir import architecture, ir_path
from epigemm.linking.libraries import unavailable

__all__ = [
    "CompileError",
    "Job",
    "LibrariesMissingError",
    "LinkError",
    "LinkingError",
    "architecture",
    "build_cubins",
    "cubin",
    "export_cache",
    "find",
    "import_cache",
    "ir_path",
    "key_for",
    "unavailable",
]
