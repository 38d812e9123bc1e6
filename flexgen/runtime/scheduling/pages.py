"""Which page holds which tokens: pools, block tables, the prefix cache. The scheduler asks; the tensors are `pools`' affair.

A page group has its own pool and one block table a request; `block_size` is the same in all groups, so one chain of hashes
over token blocks names a block in every pool. Page 0 is the pad page and never handed out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from flexgen.contract.abi import PAD_PAGE
from flexgen.runtime.requests.request import Request


class TableChange(NamedTuple):
    """One entry of a group's block table that the device does not know yet."""

    group: int
    slot: int
    block: int
    page: int


class PagePool:
    """Pages 1 to `pages`: free ones in the order they were last used, and the hashed blocks that some still hold.

    A page whose last user leaves keeps its block until it is handed out again, least recently used first. A block may
    have a note, which is kept as long as the block.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, pages + 1))
        self._users = [0] * (pages + 1)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._notes: dict[bytes, Any] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page with nothing in it that anyone may still ask for. The caller has checked `free`."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._users[page] = 1
        return page

    def give_back(self, page: int) -> None:
        assert self._users[page] > 0, f"page {page} was given back twice"
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free[page] = None
            if page not in self._hash_of:
                self._free.move_to_end(page, last=False)

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def is_free(self, page: int | None) -> bool:
        return page in self._free

    def share(self, page: int) -> None:
        """One more user of a page that holds a cached block."""
        self._free.pop(page, None)
        self._users[page] += 1

    def register(self, page: int, key: bytes, note: Any = None) -> None:
        """Let later requests find the block in `page`; the first page with a block, and its first note, keep its name."""
        if key not in self._page_of and page not in self._hash_of:
            self._page_of[key], self._hash_of[page] = page, key
        if note is not None and key in self._page_of:
            self._notes.setdefault(key, note)

    def note(self, key: bytes) -> Any:
        """The note of a cached block, or None."""
        return self._notes.get(key)

    def forget_all(self) -> None:
        self._page_of.clear()
        self._hash_of.clear()
        self._notes.clear()

    def _forget(self, page: int) -> None:
        key = self._hash_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
            self._notes.pop(key, None)


def block_hashes(known: Sequence[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Chain hashes of the full blocks of `tokens` that follow the `known` ones; `root` stands before the first.

    128 bits of BLAKE2b over the hash before and the block's ids, so that a block's name tells its whole prefix.
    """
    fresh: list[bytes] = []
    parent = known[-1] if known else root
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        block = array("q", tokens[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        fresh.append(parent)
    return fresh


class BlockTables:
    """The block tables of all requests over all groups. `windows[g]` is None where group g keeps every token."""

    def __init__(self, pages: Sequence[int], windows: Sequence[int | None], block_size: int, prefix_caching: bool) -> None:
        self.pools = [PagePool(count) for count in pages]
        self.windows = list(windows)
        self._sliding = [group for group, window in enumerate(windows) if window is not None]
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.changes: list[TableChange] = []

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def most_blocks(self, group: int, tokens: int, chunk: int) -> int:
        """Pages of `group` that a request of `tokens` tokens holds at once, when a step adds at most `chunk` of them."""
        window = self.windows[group]
        if window is None:
            return self.blocks(tokens)
        return min(self.blocks(tokens), self.blocks(window - 1 + chunk) + 1)

    def check_fits(self, prompt: int, new: int, chunk: int) -> None:
        """Raise where a request of `prompt` tokens and up to `new` more would not fit into empty pools."""
        for group, pool in enumerate(self.pools):
            needed = self.most_blocks(group, prompt + new - 1, chunk)  # the last token is never written
            if needed > pool.pages:
                raise ValueError(
                    f"{prompt} prompt tokens and up to {new} new ones take {needed} blocks of {self.block_size} tokens, "
                    f"and there are {pool.pages} in all; lower max_tokens or raise num_gpu_blocks_override or "
                    "gpu_memory_utilization"
                )

    def begin(self, request: Request, root: bytes) -> None:
        """Empty tables for a request that enters; its cached prefix is found under `root`."""
        request.pages = [[] for _ in self.pools]
        request.trimmed = [0] * len(self.pools)
        if request.cache_root != root:
            request.hashes, request.cache_root = [], root
        self.hash_blocks(request)

    def hash_blocks(self, request: Request) -> None:
        if self.prefix_caching:
            request.hashes += block_hashes(request.hashes, request.cache_root, request.tokens, self.block_size)

    def cached_blocks(self, request: Request) -> int:
        """The longest usable cached prefix, in blocks; at least one token is always left to compute.

        A prefix of n blocks is usable where each full group has all n, and each window group those that the first
        token after it can see. A request that returns its experts needs them noted for all n.
        """
        limit = min(len(request.hashes), (len(request.tokens) - 1) // self.block_size)
        if request.routes is not None:
            noted = (self.pools[0].note(key) is not None for key in request.hashes[:limit])
            limit = next((block for block, known in enumerate(noted) if not known), limit)
        usable, runs = 0, [0] * len(self.pools)  # runs: of each group, cached blocks in a row up to this one
        for count, key in enumerate(request.hashes[:limit], start=1):
            runs = [0 if pool.find(key) is None else run + 1 for pool, run in zip(self.pools, runs)]
            if any(run < count for run, window in zip(runs, self.windows) if window is None):
                break
            if all(run >= count - first for run, first in zip(runs, self._first_blocks(count))):
                usable = count
        return usable

    def _first_blocks(self, n: int) -> list[int]:
        return [self._first_block(group, n * self.block_size) for group in range(len(self.pools))]

    def _first_block(self, group: int, position: int) -> int:
        """The first block that a query at `position` still reads in `group`."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def adopt(self, request: Request, blocks: int) -> None:
        """Share `blocks` cached blocks with a request whose tables are empty. Nothing of them is computed again."""
        for group, (pool, first) in enumerate(zip(self.pools, self._first_blocks(blocks))):
            for block in range(blocks):
                page = PAD_PAGE
                if block >= first:
                    found = pool.find(request.hashes[block])
                    assert found is not None
                    page = found
                    pool.share(page)
                    self.changes.append(TableChange(group, request.slot, block, page))
                request.pages[group].append(page)
            request.trimmed[group] = min(first, blocks)
        for block in range(blocks if request.routes is not None else 0):
            request.share_routes(block * self.block_size, self.pools[0].note(request.hashes[block]))
        request.computed = blocks * self.block_size
        request.registered = blocks

    def can_admit(self, request: Request, cached: int, tokens: int) -> bool:
        """Whether `request` can adopt `cached` blocks and then grow to `tokens` in every group."""
        fresh = self.blocks(tokens) - cached
        for pool, first in zip(self.pools, self._first_blocks(cached)):
            revived = sum(pool.is_free(pool.find(key)) for key in request.hashes[first:cached])
            if fresh + revived > pool.free:
                return False
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Give `request` pages for its first `tokens` tokens in every group, or change nothing and return False.

        Pages that no later query of the request can see are freed first.
        """
        self._trim(request)
        fresh = self.blocks(tokens) - request.blocks
        if fresh <= 0:
            return True
        if any(fresh > pool.free for pool in self.pools):
            return False
        for group, (table, pool) in enumerate(zip(request.pages, self.pools)):
            for _ in range(fresh):
                table.append(pool.take())
                self.changes.append(TableChange(group, request.slot, len(table) - 1, table[-1]))
        return True

    def _trim(self, request: Request) -> None:
        for group in self._sliding:
            table = request.pages[group]
            first = min(self._first_block(group, request.computed), len(table))
            for block in range(request.trimmed[group], first):
                self.pools[group].give_back(table[block])
                table[block] = PAD_PAGE
                self.changes.append(TableChange(group, request.slot, block, PAD_PAGE))
            request.trimmed[group] = max(first, request.trimmed[group])

    def register(self, request: Request) -> None:
        """Offer the blocks of `request` that are computed and whose tokens are confirmed to later requests."""
        full = min(request.computed, len(request.tokens)) // self.block_size
        if full <= request.registered or not self.prefix_caching:
            return
        self.hash_blocks(request)
        for block in range(request.registered, full):
            routes = request.known_routes(block * self.block_size, (block + 1) * self.block_size)
            for pool, table in zip(self.pools, request.pages):
                if table[block] != PAD_PAGE:
                    pool.register(table[block], request.hashes[block], routes)
        request.registered = full

    def release(self, request: Request) -> None:
        """Give back every page, the last blocks first, so that the start of a prefix outlives its end."""
        for pool, table in zip(self.pools, request.pages):
            for page in reversed(table):
                if page != PAD_PAGE:
                    pool.give_back(page)
        request.pages, request.trimmed = [], []
        request.computed = request.registered = 0

    def take_changes(self) -> list[TableChange]:
        changes, self.changes = self.changes, []
        return changes

    def forget_all(self) -> None:
        for pool in self.pools:
            pool.forget_all()
