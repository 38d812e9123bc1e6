"""Run every GPU test in one go and print a table: `python -m tests.gpu.table`."""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest


class Collector:
    def __init__(self):
        self.outcomes, self.reasons = defaultdict(Counter), []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("[")[0].removeprefix("tests/gpu/")
            self.outcomes[name][report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.reasons.append(f"{report.nodeid}: {str(crash.message if crash else report.longrepr).strip().splitlines()[0][:200]}")


def main():
    collector = Collector()
    code = pytest.main([str(Path(__file__).parent), "-q", "--no-header", "--tb=no", *sys.argv[1:]], plugins=[collector])
    print("\n".join(collector.reasons))
    for name, counts in collector.outcomes.items():
        print(f"{name:90} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return code


if __name__ == "__main__":
    sys.exit(main())
