"""Logits become tokens: penalties, masks, temperature, top-k and top-p, the draw, and the logprob of what was drawn.

In: logits and the parameters of each row, by slot. Out: tokens, their logprobs and ranks. Always: logprobs are those of the
distribution that was drawn from. It imports requests, and what launches kernels.
"""
