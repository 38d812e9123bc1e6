"""The adapters that requests may bring, by number: read once, kept, written to a slot when one is given to them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import count

from flexgen.runtime.loading.attached import Attached, KeptAdapter
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.requests.params import LoRARequest


@dataclass(frozen=True)
class _Known:
    request: LoRARequest
    adapter: KeptAdapter
    key: bytes


class AdapterRegistry:
    """The adapters of one engine. Raises AdapterError for one that does not fit, and then knows what it knew before."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self._known: dict[int, _Known] = {}  # the one used last comes last
        self._reads = count(1)

    def wants_reading(self, request: LoRARequest) -> bool:
        """Whether an adapter is new, or to be read again. A number stands for one source."""
        known = self._known.get(request.lora_int_id)
        if known is None or request.load_inplace:
            return True
        same = known.request.lora_name == request.lora_name and _same(known.request.source, request.source)
        if not same:
            raise AdapterError(
                f"lora_int_id={request.lora_int_id} is adapter {known.request.lora_name!r} already, and the request names "
                f"{request.lora_name!r} from another source: give it a number of its own, or load_inplace=True"
            )
        return False

    def read(self, request: LoRARequest) -> KeptAdapter:
        """Read an adapter, in place of an older one of its number."""
        names = getattr(request.source, "peft_config", None)
        name = request.lora_name if names is None or request.lora_name in names else None
        adapter = self.attached.read(request.source, name, request.lora_config)
        key = f"adapter {next(self._reads)}".encode()  # other than that of any read before: no cached prefix is of it
        self._known[request.lora_int_id] = _Known(request, adapter, key)
        return adapter

    def use(self, number: int) -> bytes:
        """A request brings an adapter. -> what its cached prefixes are found by"""
        self._known[number] = self._known.pop(number)
        return self._known[number].key

    def oldest(self, needed: Set[int]) -> int | None:
        """The adapter used longest ago of those that are not needed."""
        return next((number for number in self._known if number not in needed), None)

    def place(self, slot: int, number: int) -> None:
        self.attached.place(slot, self._known[number].adapter)

    def remove(self, number: int) -> bool:
        return self._known.pop(number, None) is not None

    @property
    def numbers(self) -> set[int]:
        return set(self._known)

    @property
    def nbytes(self) -> int:
        return sum(known.adapter.nbytes for known in self._known.values())


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, str) and one == other)
