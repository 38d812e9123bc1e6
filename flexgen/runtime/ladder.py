"""The batch sizes that decode steps are padded to, where an engine's options name none."""

from __future__ import annotations

_STEPS = ((4, 1), (8, 2), (16, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""(up to, in steps of): a padding row costs a share of its batch, and in a MoE model experts of its own."""


def ladder(most: int) -> list[int]:
    """Batch sizes to capture, ascending: 1 to `most`, both included, fine where batches are small."""
    sizes, size = [], 0
    while size < most:
        size += next((step for top, step in _STEPS if size < top), 128)
        sizes.append(min(size, most))
    return sizes
