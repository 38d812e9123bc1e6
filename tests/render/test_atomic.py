"""A build killed at any moment leaves each package as it was or as it will be, and the next build cleans up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexgen.render import swap
from flexgen.render.build import write

KILLER = '''
"""Fork a build that kills itself at its nth moment, for n = 1, 2, ...; after each kill say what is there.

A moment is a line of build and swap, and each 25th line of what copies and removes folders.
"""
import json, os, shutil, signal, sys
from pathlib import Path
from flexgen.render import build, swap

folder, can_exchange = Path(sys.argv[1]), sys.argv[2] == "exchange"
old = {"walker.py": "old\\n", "gone.py": "old\\n"}
new = {"walker.py": "new\\n", "more.py": "new\\n"}
for files, version in ((old, "old"), (new, "new")):
    files["manifest.json"] = json.dumps({"version": version, "files": dict.fromkeys(files, "")})
if not can_exchange:
    swap.exchange = lambda one, other: False
watched = {build.__file__, swap.__file__, shutil.__file__}

def look():
    return {p.name: p.read_text() for p in folder.iterdir()} if folder.exists() else None

seen = []
for n in range(1, 100_000):
    if folder.exists():
        shutil.rmtree(folder)
    if sys.argv[3] == "replace":
        build.write(folder, old)
    child = os.fork()
    if child == 0:
        left, lines = n, 0
        def trace(frame, event, argument):
            global left, lines
            if frame.f_code.co_filename not in watched:
                return None
            if event == "line":
                lines += 1
                left -= frame.f_code.co_filename != shutil.__file__ or lines % 25 == 0
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        build.write(folder, new)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    state = look()
    kind = "old" if state == old else "new" if state == new else "none" if state is None else "mix"
    changed = build.write(folder, new)
    clean = sorted(p.name for p in folder.parent.iterdir()) == [folder.name]
    seen.append((kind, look() == new, clean))
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
print(json.dumps(seen))
'''


def kill_at_every_line(folder: Path, how: str, task: str) -> list[tuple[str, bool, bool]]:
    command = [sys.executable, "-c", KILLER, str(folder), how, task]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("task", ["replace", "create"])
def test_killed_at_every_line(task, tmp_path):
    seen = kill_at_every_line(tmp_path / "llama", "exchange", task)
    before = "old" if task == "replace" else "none"
    assert len(seen) > 40
    assert [kind for kind, _, _ in seen] == sorted((k for k, _, _ in seen), key=["none", "old", "new"].index)
    assert {kind for kind, _, _ in seen} == {before, "new"}
    assert all(mended and clean for _, mended, clean in seen)


def test_killed_at_every_line_without_exchange(tmp_path):
    """The fallback has one instant without the folder; the next build still ends with the new one and nothing else."""
    seen = kill_at_every_line(tmp_path / "llama", "renames", "replace")
    assert {kind for kind, _, _ in seen} == {"old", "none", "new"} and "mix" not in {k for k, _, _ in seen}
    assert sum(kind == "none" for kind, _, _ in seen) <= 3
    assert all(mended and clean for _, mended, clean in seen)


def test_a_retired_folder_comes_back(tmp_path):
    """A kill between the two renames: whoever builds any package next brings the old folder back first."""
    (tmp_path / swap.WORKSHOP / "llama.old").mkdir(parents=True)
    (tmp_path / swap.WORKSHOP / "llama.old" / "walker.py").write_text("old\n")
    write(tmp_path / "qwen3", {"walker.py": "x\n"})
    assert (tmp_path / "llama" / "walker.py").read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "qwen3"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets two folders change places")
def test_a_reader_always_finds_the_folder(tmp_path):
    folder = tmp_path / "llama"
    write(folder, {"walker.py": "0\n"})
    child = os.fork()
    if child == 0:
        for n in range(60):
            write(folder, {"walker.py": f"{n}\n"})
        os._exit(0)
    looks = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert (folder / "walker.py").read_text().strip().isdigit()
        looks += 1
    assert looks > 60


def test_the_command_killed_at_random_moments(tmp_path):
    """Of the whole `flexgen build` into a folder with packages of another time."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "flexgen", "build", "llama", "qwen3_moe", "--out", str(out)]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    length = time.monotonic() - started
    new = {path: path.read_bytes() for path in out.glob("*/*.*")}
    old = {path: b"# old\n" + text if path.suffix == ".py" else text for path, text in new.items()}
    chance = random.Random(7)
    for _ in range(3):
        for path, text in old.items():
            path.write_bytes(text)
        build = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(length * chance.uniform(0.6, 1.0))
        build.send_signal(signal.SIGKILL)
        build.wait()
        for package in {path.parent for path in new}:
            found = {path: path.read_bytes() for path in package.glob("*.*")}
            assert found in [{p: t for p, t in side.items() if p.parent == package} for side in (old, new)]
    subprocess.run(command, check=True, capture_output=True)
    assert {path: path.read_bytes() for path in out.glob("*/*.*")} == new
    assert not (out / swap.WORKSHOP).exists()


def test_a_folder_that_is_a_link_stays_one(tmp_path):
    real, link = tmp_path / "elsewhere" / "toy", tmp_path / "generated" / "toy"
    real.mkdir(parents=True)
    (real / "mine.txt").write_text("kept")
    link.parent.mkdir()
    link.symlink_to(real, target_is_directory=True)
    write(link, {"walker.py": "x = 1\n"})
    assert link.is_symlink() and (real / "walker.py").read_text() == "x = 1\n" and (real / "mine.txt").read_text() == "kept"
    assert [path.name for path in link.parent.iterdir()] == ["toy"]


FULL = """
import resource, signal, sys
from pathlib import Path
from flexgen.render.build import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write(Path(sys.argv[1]), {"walker.py": "x = 2\\n" * int(sys.argv[2])})
except OSError as error:
    print(type(error).__name__, error.filename, error.strerror)
"""


@pytest.mark.parametrize("old, new", [(None, 500), (1, 500), (500, 1)], ids=["fresh", "new too large", "old too large"])
def test_where_nothing_more_can_be_written_the_package_is_as_it_was(tmp_path, old, new):
    """The system ends every write beyond 1000 bytes, as a full disk does."""
    folder = tmp_path / "toy"
    if old:
        write(folder, {"walker.py": "x = 1\n" * old})
    before = {path.name: path.read_bytes() for path in folder.glob("*")}
    done = subprocess.run([sys.executable, "-c", FULL, str(folder), str(new)], capture_output=True, text=True)
    assert "OSError" in done.stdout and str(folder) in done.stdout and "File too large; it is as it was" in done.stdout
    assert {path.name: path.read_bytes() for path in folder.glob("*")} == before
    assert not (tmp_path / ".building").exists()
