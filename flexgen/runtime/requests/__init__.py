"""What a caller asks and gets: prompts, parameters, the state of one answer, where it stops, its text.

In: text, token ids and parameters of a user. Out: requests that the engine can serve, and outputs. Always: a request that
cannot be served is refused before it holds anything. It imports the contract and the ground of the runtime.
"""
