"""What a change of specs or templates does to the generated code, each distinct change once, with its cause.

In: two sides, each the files of packages and, where known, the specs and templates that made them. Out: a `Report`.
Always: an empty report means that every byte of every file is the same.
"""
