"""One thread a process, and a process that a test starts: the suite runs in several."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in what a test starts

import torch

torch.set_num_threads(1)
