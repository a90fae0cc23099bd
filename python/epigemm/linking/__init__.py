"""Links an epilogue into kernels that were compiled with their epilogue left open.

The functor's source goes through NVRTC, its code and an open kernel's through nvJitLink; the machine code is kept on
disk. Neither library is loaded, or looked for, before a kernel has to be made.

Imports: `epilogues`, `planning` for the cache's folder. Taken by `calls`, `precompiling`,
`tuning`, `fusion`, `__main__`.
"""
