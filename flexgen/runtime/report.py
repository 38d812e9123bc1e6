"""The memory of an engine's pages and state, how it started, and what of it runs captured, as text: `LLM.report`."""

from __future__ import annotations

from flexgen.runtime.engine import Engine
from flexgen.runtime.loading.model import Model


def memory_report(engine: Engine) -> str:
    """One line a page group and entry with recurrent state: bytes of K/V a token, of state a slot, and in all its layers.

    Then the seconds of each phase of the start, and how decode steps run.
    """
    cache, lines = engine.cache, []
    for group, pages, pool in zip(cache.groups, cache.pages, engine.tables.pools):
        page = group.page_bytes(cache.block_size, cache.dtype)
        window = group.geometry.window
        kept = "all tokens" if window is None else f"last {window} tokens"
        lines.append(
            f"pages, {kept}, {' and '.join(group.entries)}: {len(group.layers)} layers of "
            f"{group.geometry.kv_heads} x {group.geometry.head_dim}, {pages} pages of {cache.block_size} tokens ({pool.free} free), "
            f"{_size(page // cache.block_size)} a token, {_size((pages + 1) * page)}"
        )
    for entry, states in cache.states.items():
        layers, slot = len(states), cache.slot_bytes(entry)
        lines.append(
            f"recurrent state, {entry}: {layers} layers, {cache.slots} slots, {_size(slot)} a slot, "
            f"{_size(slot * (cache.slots + 1))}"
        )
    if cache.recorded is not None:
        lines.append(f"routed experts: {len(cache.recorded)} routers, {_size(cache.recorded.nbytes)}")
    caching = "on" if engine.prefix_caching else "off"
    if engine.options.enable_prefix_caching is not False and not engine.prefix_caching:
        caching = "off: this model has recurrent state, which is not kept at block ends"
    lines += _weights(engine)
    lines += [f"prefix caching: {caching}", f"sum: {_size(cache.total_bytes)}"]
    lines.append("start-up: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in engine.startup.items()))
    return "\n".join([*lines, *_decode(engine)])


def _weights(engine: Engine) -> list[str]:
    """Bytes of weights, each storage once, and how many of them are a trainer's too."""
    model, shared = engine.model, engine.shared
    if not isinstance(model, Model):
        return []
    stored, derived = model.weight_bytes()
    lines = [f"weights: {_size(stored)}, and {_size(derived)} derived of them"]
    if model.shadow_bytes:
        lines.append(f"merged adapters: {_size(model.shadow_bytes)} in {len(model.pristine)} copies of the weights that they touch")
    if engine.adapters is not None:
        room, kept = engine.adapters.attached, engine.adapters
        lines.append(
            f"adapters of requests: {_size(room.nbytes)} for {engine.options.max_loras} of rank {room.rank}, and {_size(kept.nbytes)} "
            f"kept for {len(kept.numbers)}"
        )
    if shared is not None:
        lines.append(
            f"shared with a trainer: {_size(shared.nbytes)} in {len(shared.tensors)} tensors, of which {_size(shared.copied)} moved "
            f"once; the engine's alone: {_size(stored - shared.nbytes + derived)}"
        )
    return lines


def _decode(engine: Engine) -> list[str]:
    """How decode steps run: by graphs of which sizes, and every part that has none."""
    graphs = engine.runner.graphs
    if graphs is None:
        return ["decode: without graphs"]
    return [f"decode: graphs of {', '.join(map(str, graphs.sizes))} rows", *graphs.failures]


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
