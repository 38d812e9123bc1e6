"""The runtime: loads a generated package, fills it with weights, pages its K/V, captures it and serves it.

In: a generated package and a checkpoint directory. Out: tokens and logprobs. Always: one copy of the weights, every page
and slot given back, nothing ignored.
"""
