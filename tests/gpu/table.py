"""Run every GPU test in one go and print a table: `python -m tests.gpu.table`."""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest


class Collector:
    def __init__(self):
        self.outcomes = defaultdict(Counter)

    def pytest_configure(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("[")[0].removeprefix("tests/gpu/")
            self.outcomes[name][report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                why = " / ".join(str(crash.message if crash else report.longrepr).strip().splitlines()[:3])
                self._config.get_terminal_writer().line(f"\n{report.nodeid}: {why[:300]}")
                self._config.get_terminal_writer().flush()


def main():
    collector = Collector()
    code = pytest.main([str(Path(__file__).parent), "-q", "--no-header", "--tb=no", *sys.argv[1:]], plugins=[collector])
    for name, counts in collector.outcomes.items():
        print(f"{name:90} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return code


if __name__ == "__main__":
    sys.exit(main())
