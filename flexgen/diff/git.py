"""The little of git that a comparison needs: the files below a folder at a commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from flexgen.compiler import UsageError
from flexgen.spec.diagnostics import nearest


def files_at(folder: Path, ref: str, names: Sequence[str]) -> dict[str, bytes]:
    """What a commit holds below `names`, by path relative to `folder`; nothing for a name that it lacks.

    Raises UsageError where git is not installed, `folder` is in no repository, or `ref` names no commit.
    """
    commit = _commit(folder, ref)
    listing = _git(folder, "ls-tree", "-r", "-z", commit, "--", *names).decode("utf-8", "surrogateescape")
    entries = [entry.split("\t", 1) for entry in listing.split("\0") if entry]
    blobs = {path: head.split()[2] for head, path in entries if head.split()[1] == "blob"}
    return dict(zip(blobs, _contents(folder, list(blobs.values())), strict=True))


def has_commit(folder: Path) -> bool:
    """Whether `folder` is in a repository with a commit, as far as git can be asked at all."""
    try:
        return _run(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode == 0
    except UsageError:
        return False


def _commit(folder: Path, ref: str) -> str:
    inside = _run(folder, "rev-parse", "--is-inside-work-tree")
    if inside.returncode != 0:
        said = inside.stderr.decode(errors="replace").strip().splitlines()[0]
        raise UsageError(
            f"{folder} is in no git repository that can be read, so it has no `{ref}` to compare with ({said}); "
            "give a directory instead"
        )
    found = _run(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if found.returncode != 0:
        known = _git(folder, "for-each-ref", "--format=%(refname:short)").decode(errors="replace").split()
        near = nearest(ref, known)
        raise UsageError(
            f"`{ref}` is neither a directory nor a commit of the repository at {folder}"
            + (f": did you mean `{near}`?" if near else "; a shallow clone may lack it: `git fetch` it first")
        )
    return found.stdout.decode().strip()


def _contents(folder: Path, blobs: list[str]) -> list[bytes]:
    """The contents of blobs, in order."""
    stream = _git(folder, "cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs).encode())
    found = []
    while stream:
        head, _, rest = stream.partition(b"\n")
        size = int(head.split()[2])
        found.append(rest[:size])
        stream = rest[size + 1 :]
    return found


def _git(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    done = _run(folder, *arguments, given=given)
    if done.returncode != 0:
        raise UsageError(f"`git {arguments[0]}` failed in {folder}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _run(folder: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], input=given, capture_output=True)
    except FileNotFoundError:
        raise UsageError("git is not on the PATH, and comparing with a commit needs it; give a directory") from None
