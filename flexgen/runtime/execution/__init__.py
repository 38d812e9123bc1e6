"""How a step runs: the tables by slot, the forward pass, the draw, and the CUDA graphs that hold them.

In: the plan of a step. Out: tokens and logprobs on their way to the host. Always: a replay equals the same code run
directly, bit for bit, and nothing here waits for the device. It imports every other room; the engine imports
it, and `LLM` for the compiler's early start.
"""
