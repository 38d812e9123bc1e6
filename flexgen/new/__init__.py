"""Drafts of specs: from another spec, or from a config.json and the spec that comes nearest to it.

In: a spec, or a config. Out: the text of a spec that passes `flexgen check`. Always: what the input does not settle is
marked `# TODO decide:`, and every field of a config that the draft does not read is named.
"""
