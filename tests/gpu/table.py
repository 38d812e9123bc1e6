"""Run every GPU test in one go and print a table: `python -m tests.gpu.table [--jobs N] [arguments of pytest]`.

A spec's tests share an engine, which takes half a minute to compile: each spec, and each precision test, is a process of its
own, and N run at once (a quarter of the processors, unless told). What a process found is printed when it ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexgen.bench.shapes import SHAPES
from tests.tiny import SPECS

HERE = Path(__file__).parent
PYTEST = ["-q", "--no-header", "--tb=no"]


class Collected:
    """The names of all tests that pytest would run."""

    def __init__(self):
        self.names = []

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]


class Recorder:
    """Writes a line for each test as it ends: its name, its outcome, and why it failed."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr) if report.failed else ""
            with open(self.path, "a") as file:
                file.write(json.dumps([report.nodeid, report.outcome, " / ".join(why.splitlines()[:3])[:300]]) + "\n")


def groups(names):
    """Tests by the spec or model that their parameters name, or else by file."""
    known = re.compile("|".join(sorted(map(re.escape, (*SPECS, *SHAPES)), key=len, reverse=True)))
    found = defaultdict(list)
    for name in names:
        file, _, test = name.partition("::")
        named = known.search(test.partition("[")[2])
        found[named[0] if named else file].append(name)
    return found


def counted(outcomes):
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).items())


def run(group):
    """One process for a group's tests: what Recorder wrote, and a line for each test that it never came to."""
    (label, names), started = group, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        command = [sys.executable, "-m", "tests.gpu.table", "--record", str(path), *names]
        log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {name for name, _, _ in rows}
    rows += [[name, "failed", f"did not run: {log.strip().splitlines()[-1:]}"] for name in names if name not in done]
    for name, outcome, why in rows:
        if outcome == "failed":
            print(f"{name}: {why}", flush=True)
    print(f"{label}: {counted(outcome for _, outcome, _ in rows)} in {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def main(arguments):
    if arguments[:1] == ["--record"]:
        return pytest.main([*arguments[2:], *PYTEST], plugins=[Recorder(arguments[1])])
    jobs = max(1, (os.cpu_count() or 1) // 4)
    if "--jobs" in arguments:
        at = arguments.index("--jobs")
        jobs, arguments = int(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    collected = Collected()
    code = pytest.main([str(HERE), *arguments, *PYTEST, "--collect-only"], plugins=[collected])
    if code:
        return code
    with ThreadPoolExecutor(jobs) as pool:
        rows = [row for of_group in pool.map(run, groups(collected.names).items()) for row in of_group]
    outcomes = defaultdict(list)
    for name, outcome, _ in rows:
        outcomes[name.partition("[")[0].removeprefix("tests/gpu/")].append(outcome)
    for test, found in outcomes.items():
        print(f"{test:90} {counted(found)}")
    return int(any(outcome == "failed" for _, outcome, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
