"""Resolves the named parts of a spec: norms, attentions, gated-delta mixers and MLPs; experts are in `experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flexgen.ir import architecture as ir
from flexgen.ir.effects import check_attention
from flexgen.ir.experts import Experts
from flexgen.ir.problems import Problems, defined
from flexgen.ir.scope import Scope
from flexgen.ir.shared import Shared, double
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

T = TypeVar("T")


class Parts(Shared):
    """Builds IR entries from the spec's named sections, each once; the block asks for the ones it uses."""

    def __init__(self, model: models.SpecModel, scope: Scope, problems: Problems) -> None:
        super().__init__(model, scope, problems)
        self._experts = Experts(self)
        self._built: dict[tuple[str, str], Any] = {}

    # ------------------------------------------------------------ attention

    def attention(self, name: str) -> ir.Attention:
        """The attention entry of a name that the spec defines."""
        return self._once("attention", name, self._attention)

    def _attention(self, name: str, entry: models.Attention, at: SpecPath) -> ir.Attention:
        code, flag = self.scope.code, self.scope.flag
        self._check_attention(name, entry, at)
        heads = code(entry.heads, (*at, "heads"))
        kv_heads = code(entry.kv_heads, (*at, "kv_heads"))
        width = code(entry.head_dim, (*at, "head_dim"))
        bias = flag(entry.bias, (*at, "bias"), prefix="d")
        splits, parts = self._projection(entry, heads, kv_heads, width)
        role = "".join(split.name[0] for split in splits)
        rows = self._attention_rows(entry, role, bias, parts, at)
        scale = entry.scale and code(entry.scale, (*at, "scale"), "float")
        return ir.Attention(
            name=name,
            function=f"{name}_attention",
            projection=f"w.{role}",
            bias=self.bias(bias, f"w.{role}_bias"),
            splits=splits,
            packed_gate=entry.gate != "none",
            value_from_key=entry.value == "from_key",
            q_norm=self.norm(entry.q_norm, (*at, "q_norm"), "w.q_norm"),
            k_norm=self.norm(entry.k_norm, (*at, "k_norm"), "w.k_norm"),
            v_norm=self.norm(entry.v_norm, (*at, "v_norm"), "w.v_norm"),
            rope=self._rope(entry.rope, (*at, "rope")),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            scale=scale or f"{width} ** -0.5",
            window=self.scope.optional(entry.window, (*at, "window"), "int"),
            softcap=self.scope.optional(entry.softcap, (*at, "softcap")),
            sinks=entry.sinks != "none",
            softmax_fp32=entry.softmax == "fp32",
            kv_of=None if entry.kv_of == "none" else entry.kv_of,
            o_bias=self.bias(bias, "w.o_bias"),
            table=self.table(name, rows, at),
            path=show_path(at),
            why=entry.why,
        )

    def _projection(
        self, entry: models.Attention, heads: str, kv_heads: str, width: str
    ) -> tuple[tuple[ir.Split, ...], list[tuple[str, str]]]:
        """What the fused projection yields, and the checkpoint modules that fill its rows."""
        q_width = f"2 * {width}" if entry.gate != "none" else width
        splits = [ir.Split("q", f"{heads} * {q_width}")]
        modules = [entry.q]
        if entry.kv_of == "none":
            splits.append(ir.Split("k", f"{kv_heads} * {width}"))
            modules.append(entry.k)
            if entry.value == "projected":
                splits.append(ir.Split("v", f"{kv_heads} * {width}"))
                modules.append(entry.v)
        rows = [split.rows.replace("dims.", "d.") for split in splits]
        return tuple(splits), list(zip(modules, rows, strict=True))

    def _attention_rows(
        self, entry: models.Attention, role: str, bias: bool | str, parts: list[tuple[str, str]], at: SpecPath
    ) -> list[ir.Row]:
        """The fused projection `role`, made of `parts`; the output projection; gains of norms; sinks."""
        width = self.scope.code(entry.head_dim, (*at, "head_dim"), prefix="d")
        heads = self.scope.code(entry.heads, (*at, "heads"), prefix="d")
        total = " + ".join(rows for _, rows in parts)
        weights = [(self.module(module), rows) for module, rows in parts]
        biases = [(self.module(module, "bias"), rows) for module, rows in parts]
        rows = [ir.Row(role, (total, "d.hidden"), tuple(weights)), *self.bias_row(bias, f"{role}_bias", biases)]
        rows.append(ir.Row("o", ("d.hidden", f"{heads} * {width}"), ((self.module(entry.o), "d.hidden"),)))
        rows += self.bias_row(bias, "o_bias", [(self.module(entry.o, "bias"), "d.hidden")])
        norms = {
            "q_norm": (entry.q_norm, entry.q_norm_weight),
            "k_norm": (entry.k_norm, entry.k_norm_weight),
            "v_norm": (entry.v_norm, entry.v_norm_weight),
        }
        for role, (norm, module) in norms.items():
            if norm != "none" and self.has_gain(norm):
                rows.append(ir.Row(role, (width,), ((self.module(module), width),)))
        if entry.sinks != "none":
            rows.append(ir.Row("sinks", (heads,), ((self.layers + entry.sinks, heads),)))
        return rows

    def _rope(self, name: str, path: SpecPath) -> str | None:
        if name == "none":
            return None
        if name not in self.model.ropes:
            self.problems.unknown("rope", name, defined("ropes", self.model.ropes), path)
            return None
        self.used.add(("ropes", name))
        return name

    def _check_attention(self, name: str, entry: models.Attention, at: SpecPath) -> None:
        check_attention(entry, at, self.has_gain, self.problems)
        if entry.kv_of == "none":
            return
        owner = self.model.attention.get(entry.kv_of)
        if owner is None:
            known = defined("attention", self.model.attention)
            self.problems.unknown("attention", entry.kv_of, known, (*at, "kv_of"))
            return
        if owner.kv_of != "none" or entry.kv_of == name:
            message = f"`{entry.kv_of}` keeps no keys and values of its own"
            self.problems.add("SPEC008", message, (*at, "kv_of"), help="name an attention that has none of `kv_of`")
        for field in ("kv_heads", "head_dim", "window"):
            if getattr(owner, field) != getattr(entry, field):
                message = f"`{name}` reads the keys and values of `{entry.kv_of}`, whose `{field}` differs"
                note = ("the owner is here", ("attention", entry.kv_of))
                self.problems.add("SPEC017", message, (*at, field), note=note)

    # ------------------------------------------------------------ gated delta

    def gdn(self, name: str) -> ir.GatedDelta:
        """The gated-delta entry of a name that the spec defines."""
        return self._once("gdn", name, self._gdn)

    def _gdn(self, name: str, entry: models.GatedDelta, at: SpecPath) -> ir.GatedDelta:
        def read(field: str, prefix: str) -> str:
            return self.scope.code(getattr(entry, field), (*at, field), prefix=prefix)

        key_heads, key_dim, heads, dim = (read(f, "d") for f in ("key_heads", "key_dim", "value_heads", "value_dim"))
        values = f"{heads} * {dim}"
        channels = f"2 * {key_heads} * {key_dim} + {values}"
        total = f"2 * ({key_heads} * {key_dim} + {values} + {heads})"
        projections = [(entry.qkv, channels), (entry.z, values), (entry.b, heads), (entry.a, heads)]
        parts = tuple((self.module(module), rows) for module, rows in projections)
        rows = [
            ir.Row(f"{name}_in", (total, "d.hidden"), parts),
            ir.Row(f"{name}_conv", (channels, "1", read("kernel", "d")), ((self.module(entry.conv), channels),)),
            ir.Row(f"{name}_a_log", (heads,), ((self.layers + entry.a_log, heads),)),
            ir.Row(f"{name}_dt_bias", (heads,), ((self.layers + entry.dt_bias, heads),)),
            ir.Row(f"{name}_norm", (dim,), ((self.module(entry.norm), dim),)),
            ir.Row(f"{name}_out", ("d.hidden", values), ((self.module(entry.out), "d.hidden"),)),
        ]
        return ir.GatedDelta(
            name=name,
            function=f"{name}_mixer",
            key_heads=read("key_heads", "dims"),
            key_dim=read("key_dim", "dims"),
            value_heads=read("value_heads", "dims"),
            value_dim=read("value_dim", "dims"),
            kernel=read("kernel", "d"),
            conv_act=entry.conv_act,
            eps=self.scope.code(entry.eps, (*at, "eps"), "float"),
            table=self.table(name, rows, at),
            path=show_path(at),
            why=entry.why,
        )

    # ------------------------------------------------------------ mlp

    def mlp(self, name: str) -> ir.Mlp:
        """The MLP entry of a name that the spec defines."""
        return self._once("mlp", name, self._mlp)

    def _mlp(self, name: str, entry: models.Mlp, at: SpecPath) -> ir.Mlp:
        size = self.scope.code(entry.size, (*at, "size"), prefix="d")
        bias = self.scope.flag(entry.bias, (*at, "bias"), prefix="d")
        gate, up, down = (f"{entry.at}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
        weights = tuple((self.module(half), size) for half in (gate, up))
        biases = tuple((self.module(half, "bias"), size) for half in (gate, up))
        rows = [ir.Row(f"{name}_gate_up", (double(size), "d.hidden"), weights)]
        rows += self.bias_row(bias, f"{name}_gate_up_bias", biases)
        rows.append(ir.Row(f"{name}_down", ("d.hidden", size), ((self.module(down), "d.hidden"),)))
        rows += self.bias_row(bias, f"{name}_down_bias", [(self.module(down, "bias"), "d.hidden")])
        if entry.out_gate != "none":
            rows.append(ir.Row(f"{name}_out_gate", ("1", "d.hidden"), ((self.module(entry.out_gate), "1"),)))
        return ir.Mlp(
            name=name,
            function=name,
            act=entry.act,
            gate_up=f"w.{name}_gate_up",
            gate_up_bias=self.bias(bias, f"w.{name}_gate_up_bias"),
            down=f"w.{name}_down",
            down_bias=self.bias(bias, f"w.{name}_down_bias"),
            out_gate=None if entry.out_gate == "none" else f"w.{name}_out_gate",
            table=self.table(name, rows, at),
            path=show_path(at),
            why=entry.why,
        )

    # ------------------------------------------------------------ experts

    def moe(self, name: str) -> ir.Moe:
        """The experts entry of a name that the spec defines."""
        return self._once("moe", name, self._experts.build)

    # ------------------------------------------------------------ once each

    def _once(self, section: str, name: str, build: Callable[[str, Any, SpecPath], T]) -> T:
        at = (section, name)
        if at not in self._built:
            self.used.add(at)
            self._built[at] = build(name, getattr(self.model, section)[name], at)
        return self._built[at]

    def built(self, section: str) -> list:
        """The entries of a section that were used, in the spec's order."""
        order = list(getattr(self.model, section))
        return [self._built[section, name] for name in order if (section, name) in self._built]
