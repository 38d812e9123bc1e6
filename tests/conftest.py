"""One thread a process: the suite runs in several."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
