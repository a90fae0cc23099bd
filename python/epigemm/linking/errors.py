"""What can go wrong when an epilogue is linked in."""

from __future__ import annotations


class LinkingError(RuntimeError):
    """A kernel with this epilogue could not be made."""


class LibrariesMissingError(LinkingError):
    """NVRTC or nvJitLink is not there, or not in a version of use."""


class _WithLogError(LinkingError):
    """One that has a library's log.

    Attributes:
        log: what the library said, as it said it.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


class CompileError(_WithLogError):
    """NVRTC refused the epilogue's source."""


class LinkError(_WithLogError):
    """nvJitLink refused the kernel's or the epilogue's code."""
