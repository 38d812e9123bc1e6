"""Who runs next, and on which pages.

In: requests that wait or run. Out: the rows of the next step, and pages for them. Always: N slots are N, every page and
slot comes back, and a request that was preempted keeps what it generated. It imports requests and the contract.
"""
