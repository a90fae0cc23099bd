"""What can go wrong when an epilogue is linked in."""

from __future__ import annotations


class LinkingError(RuntimeError):
    """A kernel with this epilogue could not be made."""


class LibrariesMissingError(LinkingError):
    """NVRTC or nvJitLink is not there, or not in a version of use."""


class CompileError(LinkingError):
    """NVRTC refused the epilogue's source.

    Attributes:
        log: what NVRTC said, as it said it.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


class LinkError(LinkingError):
    """nvJitLink refused the kernel's or the epilogue's code.

    Attributes:
        log: what nvJitLink said, as it said it.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log
