"""What generated code calls: attention, experts, recurrent mixers, and the arithmetic between them.

In: the tensors of one step. Out: tensors. Always: an obvious form in PyTorch beside each kernel, and the same results.
It imports the contract and the ground of the runtime, nothing of requests or of how a step is run.
"""
