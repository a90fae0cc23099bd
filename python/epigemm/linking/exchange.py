"""The cache of linked kernels as one file, for machines without NVRTC and nvJitLink."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

from epigemm.linking import cubins, store
from epigemm.linking.store import SUFFIX, Entry, decode, is_key
from epigemm.tables import write_whole

_MOST_BYTES = 64 << 20  # of an entry; the largest kernels take some hundred KB


def export_cache(path: str | os.PathLike[str], only: Sequence[str] | None = None) -> int:
    """Write linked kernels, of this process and on disk, to a zip file.

    A damaged entry on disk is removed with one warning, and is not in the file.

    Args:
        path: the file. One that is there is replaced, once the new one is whole.
        only: the keys of the entries (`cubins.key_for`); None for all.

    Returns:
        How many entries the file has.

    Raises:
        ValueError: there is no entry for a key in `only`.
        OSError: the file cannot be written.

    Example:
        >>> export_cache("kernels.zip")  # doctest: +SKIP
        12
    """
    in_memory = cubins.made.values()
    wanted = sorted({*in_memory, *store.keys()}) if only is None else list(dict.fromkeys(only))
    buffer = io.BytesIO()
    count = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for key in wanted:
            entry = in_memory.get(key) or (store.read(key) if is_key(key) else None)
            if entry is not None:
                archive.writestr(f"{key}{SUFFIX}", entry.encode())
                count += 1
            elif only is not None:
                raise ValueError(f"the cache has no linked kernel {key!r}")
    write_whole(Path(path), buffer.getvalue())
    return count


def import_cache(path: str | os.PathLike[str]) -> int:
    """Take the linked kernels of a file that `export_cache` wrote: for this process, and onto its disk.

    Either all are taken or none. They are machine code for the GPU: take none from people whom you do not trust.
    Where the disk cannot be written, they last as long as the process, and one warning says so.

    Returns:
        How many entries there were.

    Raises:
        ValueError: the file is damaged, or has something else in it; the text names the entry.
        OSError: the file cannot be read.

    Example:
        >>> import_cache("kernels.zip")  # doctest: +SKIP
        12
    """
    data = Path(path).read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [_entry(archive, each) for each in archive.infolist()]
    except Exception as error:  # zipfile raises nearly anything over a damaged file
        raise ValueError(f"nothing is taken of {os.fspath(path)}: {error or type(error).__name__}") from error
    for entry in entries:
        cubins.made.put(entry.key, entry)
        store.write(entry)
    return len(entries)


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    key = info.filename.removesuffix(SUFFIX)
    if info.filename != f"{key}{SUFFIX}" or not is_key(key):
        raise ValueError(f"{info.filename!r} is no linked kernel")
    if info.file_size > _MOST_BYTES:
        raise ValueError(f"{info.filename} is too large for a linked kernel: {info.file_size} bytes")
    try:
        return decode(archive.read(info), key)
    except Exception as error:
        raise ValueError(f"{info.filename}: {error or type(error).__name__}") from error
