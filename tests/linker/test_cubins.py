"""The cache of linked kernels: threads, processes, and everything that can be wrong with a file or its folder."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epigemm.linker import cubins, libraries, store
from epigemm.linker.cubins import Job, build_cubins, cubin, find, key_for
from epigemm.linker.libraries import CompileError, LibrariesMissingError, LinkError
from epigemm.linker.store import MAGIC, Once, encoded
from tests.linker.fakes import (
    BAD_IR,
    BAD_SOURCE,
    KERNEL_IR,
    SOURCE,
    SYMBOL,
    FakeNvJitLink,
    FakeNvrtc,
    fakes,
    forget,
    packaged,
)
from tests.support.pretended import pretend_linking

Fakes = tuple[FakeNvrtc, FakeNvJitLink]
JOB = Job(SOURCE, SYMBOL, KERNEL_IR, (9, 0))
CODE = b"\x7fELF code"


def test_made_once_then_from_memory_then_from_disk(
    fake: Fakes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, too, which has a copy of the folder and no libraries."""
    first = cubin(*JOB)
    assert [each.name for each in folder.iterdir()] == [f"{key_for(JOB)}.cubin"]
    shutil.move(folder.parent, tmp_path / "copy")
    assert cubin(*JOB) == first and find(*JOB) == first
    assert len(fake[0].calls) == len(fake[1].calls) == 1
    forget()
    assert find(*JOB) is None
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "copy"))
    pretend_linking(monkeypatch, found="there are none")
    assert find(*JOB) == first
    assert cubin(*JOB) == first
    with pytest.raises(LibrariesMissingError, match="there are none"):
        cubin(*JOB._replace(source=SOURCE + "// other"))
    assert find(*JOB._replace(source=SOURCE + "// other")) is None


def test_what_an_entry_is_known_by(fake: Fakes) -> None:
    others = [
        JOB,
        JOB._replace(source=SOURCE + " "),
        JOB._replace(symbol=SYMBOL + "_"),
        JOB._replace(ir=KERNEL_IR + b" "),
        JOB._replace(capability=(8, 0)),
    ]
    assert len({key_for(each) for each in others}) == len(others)
    assert len({cubin(*each) for each in others[:-1]}) == len(others) - 1


def test_a_failure_is_not_kept(fake: Fakes, folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            cubin(*JOB._replace(source=BAD_SOURCE))
        with pytest.raises(LinkError):
            cubin(*JOB._replace(ir=BAD_IR))
    assert not folder.exists()


# --- side by side ----------------------------------------------------------------------------------------------------


def test_threads_wait_for_the_first(fake: Fakes) -> None:
    fake[1].seconds = 0.05
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cubin(*JOB), range(32)))
    assert len(set(results)) == 1
    assert len(fake[0].calls) == len(fake[1].calls) == 1


def test_several_kernels_share_the_compilation(fake: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)))
    fake[1].seconds = 0.1
    jobs = [JOB, JOB._replace(symbol="epigemm_open_fixup_float32"), JOB]
    kernel, fixup, again = build_cubins(jobs)
    assert kernel == again != fixup
    assert len(fake[0].calls) == 1 and len(fake[1].calls) == 2
    assert fake[1].most_at_once == 2


def _write_many(folder: str, count: int) -> None:
    os.environ["EPIGEMM_CACHE_DIR"] = folder
    warnings.simplefilter("error")
    libraries._found = fakes()[2]
    for index in range(count):
        job = JOB._replace(source=SOURCE * 2000 + f"// {index % 5}")
        store.made.values.clear()
        code = cubin(*job)
        store.write(key_for(job), code)
        store.made.values.clear()
        assert find(*job) == code


def test_several_processes_write_the_same_entries(folder: Path) -> None:
    """A reader never sees half a file: a warning would be an error."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(str(folder.parent), 60)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    names = sorted(each.name for each in folder.iterdir())
    assert len(names) == 5 and all(each.endswith(".cubin") for each in names)


def test_a_fork_while_a_kernel_is_made() -> None:
    """The child makes it itself; nobody would end what its parent's thread had begun."""
    once: Once[int] = Once()
    once.values["kept"] = 1
    is_making, may_end = threading.Event(), threading.Event()

    def make() -> int:
        is_making.set()
        may_end.wait(30)
        return 2

    thread = threading.Thread(target=once.get, args=("a", make))
    thread.start()
    assert is_making.wait(10)
    child = multiprocessing.get_context("fork").Process(target=_get_in_child, args=(once,))
    child.start()
    child.join(20)
    may_end.set()
    thread.join()
    assert child.exitcode == 0
    assert once.values == {"kept": 1, "a": 2}


def _get_in_child(once: Once[int]) -> None:
    assert once.get("a", lambda: 7) == 7
    assert once.values.get("kept") == 1


# --- damage ----------------------------------------------------------------------------------------------------------


def resealed(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """A change behind the checksum, with a checksum that fits."""

    def apply(data: bytes) -> bytes:
        rest = change(data[len(MAGIC) + 32 :])
        return MAGIC + hashlib.sha256(rest).digest() + rest

    return apply


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no entry of the cache"),
    "longer": (lambda data: data + b"\0", "checksum is wrong"),
    "a flipped bit": (lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:], "checksum is wrong"),
    "another entry": (lambda data: encoded(key_for(JOB._replace(symbol="x")), CODE), "another entry's"),
    "no key": (resealed(lambda rest: b""), "another entry's"),
    "a key alone": (resealed(lambda rest: rest[:64]), "no machine code"),
    "no machine code": (resealed(lambda rest: rest.replace(b"\x7fELF", b"\x7fELG")), "no machine code"),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_entry_is_made_again_with_one_warning(
    damage: Callable[[bytes], bytes], why: str, fake: Fakes, folder: Path
) -> None:
    first = cubin(*JOB)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for _ in range(2):
        forget()
        path.write_bytes(damage(whole))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert cubin(*JOB) == first
        assert path.read_bytes() == whole
        if _ == 0:
            (warning,) = caught
            assert f"epigemm: the linked kernel {path} is removed and made again" in str(warning.message)
            assert why in str(warning.message)
        else:
            assert not caught


def test_a_damaged_entry_is_removed_where_it_cannot_be_made(folder: Path, no_libraries: None) -> None:
    folder.mkdir(parents=True)
    path = folder / f"{key_for(JOB)}.cubin"
    path.write_bytes(b"hello")
    with pytest.warns(RuntimeWarning, match="is removed"):
        assert find(*JOB) is None
    assert not path.exists()


# --- the folder ------------------------------------------------------------------------------------------------------


def no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file")


def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)


@pytest.mark.parametrize(
    ("spoil", "words"), [(no_folder, "last as long as this process"), (full_disk, "No space left")]
)
def test_a_folder_that_cannot_be_written(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    words: str,
    fake: Fakes,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said once; kernels last as long as the process, and are made again by the next one."""
    spoil(folder, monkeypatch)
    with pytest.warns(RuntimeWarning, match=words) as caught:
        first = cubin(*JOB)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubin(*JOB._replace(source=SOURCE + "//"))
        forget()
        assert cubin(*JOB) == first
    assert not folder.exists() or not list(folder.iterdir())


# --- kernels that are in the package ----------------------------------------------------------------------------------


HOPPER, CODE = (9, 0), b"\x7fELF machine code"


@pytest.fixture
def folder_of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels of the package's: of one epilogue, with one kernel."""
    with zipfile.ZipFile(tmp_path / "bias.zip", "w") as archive:
        archive.writestr("kernel", CODE)
        archive.writestr("text", b"no machine code")
    for _ in packaged(monkeypatch, tmp_path):
        yield tmp_path


def test_what_is_there(folder_of_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper, of epilogues that are not given up, as long as no other open kernels are chosen."""
    assert (
        cubins.is_prelinked("bias", "kernel", HOPPER) and cubins.prelinked("bias", "kernel", HOPPER) == CODE
    )
    for question in (
        ("bias", "other", HOPPER),
        ("relu_div", "kernel", HOPPER),
        ("bias", "kernel", (8, 0)),
        ("bias", "kernel", (10, 0)),
    ):
        assert not cubins.is_prelinked(*question) and cubins.prelinked(*question) is None
    monkeypatch.setenv("EPIGEMM_IR_DIR", "/elsewhere")  # other open kernels: everything is linked anew
    assert not cubins.is_prelinked("bias", "kernel", HOPPER)
