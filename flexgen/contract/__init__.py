"""What compiler and runtime agree on, each thing once. No torch, no pydantic, no Jinja.

In: plain values of a spec or a config.json. Out: the types of a package's declarations, and the rules that both sides apply
to them. Always: a rule that the compiler checks is the one that the loader runs. It imports `flexgen.errors` alone.
"""
