"""Links an epilogue into open kernels, which were compiled without one.

NVRTC compiles the functor's source, and nvJitLink links the result with an open kernel. The machine code is kept on
disk. The two libraries are searched and loaded only when a kernel has to be made.

Imports: `epilogues`, `planner` for the cache's folder. Taken by `calls`, `precompilation`,
`tuner`, `fusion`, `__main__`.
"""
