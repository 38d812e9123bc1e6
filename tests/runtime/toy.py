"""A small language model in plain torch that keeps its state the way a generated package does.

It really writes K/V through the slot mapping and reads it through the block tables, so that any mistake in paging, slots
or order changes its tokens. Optional: a window group, an entry that shares another's pages, a recurrent layer.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from flexgen.contract.abi import Layer
from flexgen.contract.state import Pages, SharedPages, Slots

WIDTH, HEADS, HEAD = 32, 2, 16


class Toy:
    """The interface of flexgen.runtime.loading.model.Model over random fp32 weights."""

    def __init__(self, vocab=61, kinds=("full",), window=5, seed=0, longest=256, config=None):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

        self.dims = SimpleNamespace(vocab=vocab, layers=len(kinds))
        self.config = {"max_position_embeddings": longest, **(config or {})}
        self.directory, self.device, self.dtype, self.weight_version = None, torch.device("cpu"), torch.float32, 0
        self.missing_weights: set[str] = set()
        self.load_seconds, self.weights, self.head_dtype = 0.0, SimpleNamespace(), None
        self.mixers, self.routers = [(kind,) for kind in kinds], [{} for _ in kinds]
        every = {
            "full": Pages(HEADS, HEAD),
            "sliding": Pages(HEADS, HEAD, window),
            "shared": SharedPages("full"),
            "recurrent": Slots({"memory": ((WIDTH,), None)}),
        }
        self.state = {kind: every[kind] for kind in dict.fromkeys(kinds)}
        self.embed, self.place, self.head = draw(vocab, WIDTH) * 3, draw(longest + 1, WIDTH), draw(vocab, WIDTH) * 2
        self.layers = [
            Layer(qkv=draw(3 * HEADS * HEAD, WIDTH), out=draw(WIDTH, HEADS * HEAD) * 4, gate=draw(WIDTH, WIDTH))
            for _ in kinds
        ]
        self.window, self.calls, self.tokens_run, self.writes = window, 0, 0, []

    def make_rope_tables(self, length):
        assert length <= len(self.place)

    def forward(self, ids_T, step):
        self.calls, self.tokens_run = self.calls + 1, self.tokens_run + len(ids_T)
        assert step.positions_T.shape == ids_T.shape
        x_TD = self.embed[ids_T] + self.place[step.positions_T]
        for layer, (kind,) in zip(self.layers, self.mixers):
            mix = self.recur if kind == "recurrent" else self.attend
            x_TD = x_TD + mix(layer, x_TD / x_TD.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH), kind, step)
        return x_TD / x_TD.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH)

    def logits(self, hidden_RD):
        return hidden_RD @ self.head.T

    def attend(self, layer, x_TD, kind, step):
        q, k, v = (x_TD @ layer.qkv.T).view(-1, 3, HEADS, HEAD).unbind(1)
        pages = step.pages[kind]
        if kind != "shared":
            live = pages.slots_T[pages.slots_T >= layer.k_pages.shape[1]]
            assert len(live.unique()) == len(live), "two tokens of one step write the same place"
            layer.k_pages.flatten(0, 1)[pages.slots_T] = k
            layer.v_pages.flatten(0, 1)[pages.slots_T] = v
        out = torch.empty_like(q)
        for row in range(len(step.starts_R) - 1):
            start, stop, length = int(step.starts_R[row]), int(step.starts_R[row + 1]), int(step.lengths_R[row])
            assert stop > start, "a row without a token"
            table = pages.table_RB[row].long()
            keys = layer.k_pages[table].flatten(0, 1)[:length]
            behind = step.positions_T[start:stop, None] - torch.arange(length)
            hidden = (behind < 0) | (behind >= self.window if kind == "sliding" else False)
            values = layer.v_pages[table].flatten(0, 1)[:length].masked_fill(hidden.all(0)[:, None, None], 0)
            scores = torch.einsum("thd,lhd->htl", q[start:stop], keys).masked_fill(hidden, float("-inf"))
            out[start:stop] = torch.einsum("htl,lhd->thd", scores.softmax(-1), values)
        return out.flatten(1) @ layer.out.T

    def recur(self, layer, x_TD, kind, step):
        out, inputs = torch.empty_like(x_TD), x_TD @ layer.gate.T
        for row in range(len(step.starts_R) - 1):
            memory = layer.memory[step.state_R[row]]
            for token in range(int(step.starts_R[row]), int(step.starts_R[row + 1])):
                memory = 0.7 * memory + torch.tanh(inputs[token])
                out[token] = memory
            layer.memory[step.state_R[row]] = memory
        return out

    @torch.no_grad()
    def reference_logits(self, ids):
        """Logits after each of `ids`, without pages: the closed form of a whole prefill."""
        x_TD = self.embed[torch.tensor(ids)] + self.place[: len(ids)]
        owner = {}
        for layer, (kind,) in zip(self.layers, self.mixers):
            h_TD = x_TD / x_TD.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH)
            if kind == "recurrent":
                memory, rows = torch.zeros(WIDTH), []
                for row in torch.tanh(h_TD @ layer.gate.T):
                    memory = 0.7 * memory + row
                    rows.append(memory)
                x_TD = x_TD + torch.stack(rows)
                continue
            q, k, v = (h_TD @ layer.qkv.T).view(-1, 3, HEADS, HEAD).unbind(1)
            k, v = owner["full"] if kind == "shared" else (k, v)
            owner[kind] = (k, v)
            behind = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
            hidden = (behind < 0) | (behind >= self.window if kind == "sliding" else False)
            weights = torch.einsum("thd,lhd->htl", q, k).masked_fill(hidden, float("-inf")).softmax(-1)
            x_TD = x_TD + torch.einsum("htl,lhd->thd", weights, v).flatten(1) @ layer.out.T
        return self.logits(x_TD / x_TD.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH))

    def greedy(self, ids, count):
        """`count` greedy tokens after `ids`, each from a whole prefill."""
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.reference_logits(ids)[-1].argmax()))
        return ids[-count:]
