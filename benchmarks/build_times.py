"""How long the compiler takes, start of Python included: `flexgen check` and `flexgen build` of every spec.

    python benchmarks/build_times.py [--repeats N]

Prints the median and the fastest of N runs beside the aim, and writes results/build-times.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flexgen.compiler import find_specs

AIMS = {"check": 0.5, "build from nothing": 1.0, "build with nothing to do": 1.0}
RESULTS = Path(__file__).parent / "results" / "build-times.json"


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flexgen", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in AIMS}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            times["check"].append(seconds(["check"]))
            times["build from nothing"].append(seconds(["build", "--out", folder]))
            times["build with nothing to do"].append(seconds(["build", "--out", folder]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    times = measure(parser.parse_args().repeats)
    specs = len(find_specs([]))
    result = {
        "specs": specs,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "seconds": {
            name: {"median": round(statistics.median(found), 3), "fastest": round(min(found), 3), "aim": AIMS[name]}
            for name, found in times.items()
        },
    }
    for name, row in result["seconds"].items():
        verdict = "met" if row["median"] < row["aim"] else "MISSED"
        print(
            f"{name:<26} median {row['median']:.2f} s   fastest {row['fastest']:.2f} s   aim < {row['aim']} s: {verdict}"
        )
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{specs} specs; wrote {RESULTS}")


if __name__ == "__main__":
    main()
