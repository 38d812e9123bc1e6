"""A checkpoint becomes a model: a package, a config.json and safetensors files in, layers with weights out.

Always: one storage a weight, filled once; a tensor that nobody loads and a field that nobody reads are refused by name. It
imports the contract, the ground of the runtime, and ops where a dtype decides how weights are kept.
"""
