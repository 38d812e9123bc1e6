"""Parity with transformers.

In: a spec's name or a generated package, and a checkpoint or none. Out: a `Report`. Always: both models hold the same
weights, fp32, and transformers runs eager attention and eager experts.
"""

from flexgen.verify.report import Difference, Report, Row
from flexgen.verify.run import verify

__all__ = ["Difference", "Report", "Row", "verify"]
