"""Which adapter lies in which slot of the tables, and who uses it. The scheduler asks before a request enters.

0 is no adapter, and slot 0 none. An adapter that no running request uses keeps its slot until another one needs it, the one
used longest ago first. A pinned one never does.
"""

from __future__ import annotations

from collections import Counter


class AdapterSlots:
    """`count` slots, numbered from 1."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._slots: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._count, self.pinned = count, set[int]()

    def can_take(self, adapter: int) -> bool:
        """Whether a request with this adapter can run beside those that do."""
        return not adapter or adapter in self._slots or bool(self._free) or self._unused() is not None

    def take(self, adapter: int) -> tuple[int, bool]:
        """One more request of an adapter: its slot, and whether its updates have to be written there first."""
        if not adapter:
            return 0, False
        fresh = adapter not in self._slots
        if fresh:
            if not self._free:
                unused = self._unused()
                assert unused is not None  # `can_take` said so
                self._free.append(self._slots.pop(unused))
            self._slots[adapter] = self._free.pop()
        else:
            self._slots[adapter] = self._slots.pop(adapter)  # to the end: used last
        self._users[adapter] += 1
        return self._slots[adapter], fresh

    def give_back(self, adapter: int) -> None:
        """One request less."""
        if adapter:
            self._users[adapter] -= 1

    def used(self, adapter: int) -> bool:
        return self._users[adapter] > 0

    def can_pin(self, adapter: int) -> bool:
        """Whether a slot would be left for other adapters."""
        return len(self.pinned | {adapter}) < self._count

    def forget(self, adapter: int) -> None:
        """Free the slot of an adapter that nobody uses: what lies there is no longer it."""
        assert not self.used(adapter)
        if adapter in self._slots:
            self._free.append(self._slots.pop(adapter))

    def _unused(self) -> int | None:
        return next((each for each in self._slots if not self._users[each] and each not in self.pinned), None)
