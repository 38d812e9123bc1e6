"""Puts a finished folder in the place of another so that no reader, and no kill, ever finds neither or a mix.

On Linux the two folders change places in one system call. Where the kernel or the filesystem cannot do that (macOS,
Windows, some network filesystems), two renames follow each other: there is an instant without the folder, and when a
build is killed in it the next one brings the old folder back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKSHOP = ".building"
"""The folder beside the packages in which they are built; there only while that lasts, or after a kill."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """An empty folder to build the successor of `folder` in; put it in place with `swap`. It is gone afterwards.

    One build at a time works below a parent folder, so what is in its workshop before was left by one that was killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        _recover(folder.parent)
        workshop = folder.parent / WORKSHOP
        workshop.mkdir()
        try:
            yield Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=workshop))
        finally:
            shutil.rmtree(workshop)


def recover(parent: Path) -> None:
    """Clean up what a killed build left below `parent`, if one did."""
    if (parent / WORKSHOP).exists():
        with _locked(parent):
            _recover(parent)


def swap(staged: Path, folder: Path) -> None:
    """Put `staged` in the place of `folder`; what was there before goes into the workshop. Raises OSError."""
    if not folder.exists():
        os.rename(staged, folder)
    elif not exchange(staged, folder):
        retired = _retired(folder)
        os.rename(folder, retired)
        try:
            os.rename(staged, folder)
        except OSError:
            os.rename(retired, folder)
            raise


def exchange(one: Path, other: Path) -> bool:
    """Let two paths change places at once. -> False where the system has no such call. Raises OSError."""
    if sys.platform != "linux":
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _recover(parent: Path) -> None:
    workshop = parent / WORKSHOP
    if not workshop.exists():
        return
    for retired in workshop.glob("*.old"):
        folder = parent / retired.name.removesuffix(".old")
        if not folder.exists():
            os.rename(retired, folder)
    shutil.rmtree(workshop)


def _retired(folder: Path) -> Path:
    return folder.parent / WORKSHOP / f"{folder.name}.old"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system takes back from a process that dies. Without `fcntl` there is none."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
