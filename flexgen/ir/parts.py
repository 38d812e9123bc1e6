"""Resolves the named parts of a spec: norms, attentions, gated-delta mixers, MLPs and experts."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen.ir import architecture as ir
from flexgen.ir.effects import check_attention
from flexgen.ir.problems import Problems, defined
from flexgen.ir.scope import Scope
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath

LAYER = "layers.*."
NORMS = {
    ("plain", "after"): "rms_norm",
    ("none", "after"): "rms_norm",
    ("none", "before"): "rms_norm",
    ("plain", "before"): "rms_norm_cast_before",
    ("one_plus", "after"): "rms_norm_one_plus",
}


class Parts:
    """Builds IR entries from the spec's named sections, each once; the block asks for the ones it uses."""

    def __init__(self, model: models.SpecModel, scope: Scope, problems: Problems) -> None:
        self.model = model
        self.scope = scope
        self.problems = problems
        self.layers = model.checkpoint.layers + "."
        self.used: set[tuple[str, str]] = set()
        self._built: dict[tuple[str, str], object] = {}

    # ------------------------------------------------------------ shared helpers

    def module(self, name: str, suffix: str = "weight") -> str:
        """The checkpoint name of a module's tensor in a layer."""
        return f"{self.layers}{name}.{suffix}"

    def norm(self, name: str, path: SpecPath, gain: str) -> ir.NormCall | None:
        """A call of a named norm; `gain` is code for its weight, used where the norm has one."""
        if name == "none":
            return None
        entry = self.model.norms.get(name)
        if entry is None:
            self.problems.unknown("norm", name, defined("norms", self.model.norms), path)
            return None
        self.used.add(("norms", name))
        function = NORMS.get((entry.gain, entry.cast))
        at = ("norms", name)
        if function is None:
            message = f"a norm with gain {entry.gain} and cast {entry.cast} is not implemented"
            self.problems.add("SPEC025", message, (*at, "cast"), help="gain one_plus goes with cast after")
            return None
        eps = self.scope.code(entry.eps, (*at, "eps"), "float")
        return ir.NormCall(function, "None" if entry.gain == "none" else gain, eps, entry.why, f"norms.{name}")

    def has_gain(self, name: str) -> bool:
        """Whether a named norm has a weight."""
        entry = self.model.norms.get(name)
        return entry is not None and entry.gain != "none"

    def bias(self, flag: bool | str, code: str) -> str:
        """The bias argument of a linear: its weight where there can be one."""
        return "None" if flag is False else code

    def bias_row(self, flag: bool | str, role: str, parts: Sequence[tuple[str, str]]) -> list[ir.Row]:
        """The weight row of a bias that is there, may be there, or is not."""
        if flag is False:
            return []
        rows = " + ".join(rows for _, rows in parts)
        return [ir.Row(role, (rows,), tuple(parts), present=None if flag is True else flag)]

    # ------------------------------------------------------------ attention

    def attention(self, name: str) -> ir.Attention:
        """The attention entry of a name that the spec defines."""
        return self._once("attention", name, self._attention)

    def _attention(self, name: str, entry: models.Attention, at: SpecPath) -> ir.Attention:
        code, flag = self.scope.code, self.scope.flag
        self._check_attention(name, entry, at)
        heads, kv_heads, width = (
            code(text, (*at, field))
            for text, field in ((entry.heads, "heads"), (entry.kv_heads, "kv_heads"), (entry.head_dim, "head_dim"))
        )
        bias = flag(entry.bias, (*at, "bias"), prefix="d")
        splits, parts = self._projection(entry, heads, kv_heads, width)
        role = "".join(split.name[0] for split in splits)
        table_rows = self._attention_rows(entry, role, bias, parts, at)
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
            table=ir.WeightTable(f"{name}_weights", tuple(table_rows), ".".join(at)),
            path=".".join(map(str, at)),
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
        width = self.scope.code(entry.head_dim, (*at, "head_dim"), prefix="d")
        heads = self.scope.code(entry.heads, (*at, "heads"), prefix="d")
        total = " + ".join(rows for _, rows in parts)
        rows = [ir.Row(role, (total, "d.hidden"), tuple((self.module(m), r) for m, r in parts))]
        rows += self.bias_row(bias, f"{role}_bias", [(self.module(m, "bias"), r) for m, r in parts])
        rows.append(ir.Row("o", ("d.hidden", f"{heads} * {width}"), ((self.module(entry.o), "d.hidden"),)))
        rows += self.bias_row(bias, "o_bias", [(self.module(entry.o, "bias"), "d.hidden")])
        for norm, module, role in (
            (entry.q_norm, entry.q_norm_weight, "q_norm"),
            (entry.k_norm, entry.k_norm_weight, "k_norm"),
            (entry.v_norm, entry.v_norm_weight, "v_norm"),
        ):
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
                self.problems.add(
                    "SPEC017", message, (*at, field), note=("the owner is here", ("attention", entry.kv_of))
                )

    # ------------------------------------------------------------ gated delta

    def gdn(self, name: str) -> ir.GatedDelta:
        """The gated-delta entry of a name that the spec defines."""
        return self._once("gdn", name, self._gdn)

    def _gdn(self, name: str, entry: models.GatedDelta, at: SpecPath) -> ir.GatedDelta:
        def read(field: str, prefix: str) -> str:
            return self.scope.code(getattr(entry, field), (*at, field), prefix=prefix)

        kh, kd, vh, vd = (read(field, "d") for field in ("key_heads", "key_dim", "value_heads", "value_dim"))
        channels = f"2 * {kh} * {kd} + {vh} * {vd}"
        projections = [(entry.qkv, channels), (entry.z, f"{vh} * {vd}"), (entry.b, vh), (entry.a, vh)]
        rows = [
            ir.Row(
                f"{name}_in",
                (f"2 * ({kh} * {kd} + {vh} * {vd} + {vh})", "d.hidden"),
                tuple((self.module(m), r) for m, r in projections),
            ),
            ir.Row(f"{name}_conv", (channels, "1", read("kernel", "d")), ((self.module(entry.conv), channels),)),
            ir.Row(f"{name}_a_log", (vh,), ((self.layers + entry.a_log, vh),)),
            ir.Row(f"{name}_dt_bias", (vh,), ((self.layers + entry.dt_bias, vh),)),
            ir.Row(f"{name}_norm", (vd,), ((self.module(entry.norm), vd),)),
            ir.Row(f"{name}_out", ("d.hidden", f"{vh} * {vd}"), ((self.module(entry.out), "d.hidden"),)),
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
            table=ir.WeightTable(f"{name}_weights", tuple(rows), ".".join(map(str, at))),
            path=".".join(map(str, at)),
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
        halves = [(gate, size), (up, size)]
        rows = [ir.Row(f"{name}_gate_up", (_double(size), "d.hidden"), tuple((self.module(m), r) for m, r in halves))]
        rows += self.bias_row(bias, f"{name}_gate_up_bias", [(self.module(m, "bias"), r) for m, r in halves])
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
            table=ir.WeightTable(f"{name}_weights", tuple(rows), ".".join(map(str, at))),
            path=".".join(map(str, at)),
            why=entry.why,
        )

    # ------------------------------------------------------------ experts

    def moe(self, name: str) -> ir.Moe:
        """The experts entry of a name that the spec defines."""
        return self._once("moe", name, self._moe)

    def _moe(self, name: str, entry: models.Moe, at: SpecPath) -> ir.Moe:
        router = entry.router
        here = (*at, "router")
        code = self.scope.code
        layout, interleaved = self._memory_layout(entry, at)
        bias = self.scope.flag(router.bias, (*here, "bias"), prefix="d")
        normalise = self.scope.flag(router.normalise, (*here, "normalise"))
        statements, input_rows = self._router_input(name, router, here)
        if router.score == "none" and router.after_top_k == "none":
            message = "the router turns its logits into weights nowhere"
            self.problems.add("SPEC005", message, here, key=True, help="set `score` or `after_top_k`")
        return ir.Moe(
            name=name,
            route=f"{name}_route",
            experts=f"{name}_experts",
            routed=f"{name}_routed",
            top_k=self.scope.code(entry.top_k, (*at, "top_k")),
            router_input=statements,
            router=f"w.{name}_router",
            router_bias=self.bias(bias, f"w.{name}_router_bias"),
            reads_stream=router.reads == "stream",
            score=router.score,
            after_top_k=router.after_top_k,
            normalise=None if normalise is False else str(normalise),
            gain=None if router.gain == "none" else f"w.{name}_expert_gain",
            weights_fp32=router.dtype == "fp32",
            act=entry.act,
            layout=layout,
            interleaved=interleaved,
            gate_up=f"w.{name}_gate_up",
            gate_up_bias="None" if entry.gate_up_bias == "none" else f"w.{name}_gate_up_bias",
            down=f"w.{name}_down",
            down_bias="None" if entry.down_bias == "none" else f"w.{name}_down_bias",
            alpha=self.scope.optional(entry.alpha, (*at, "alpha")),
            limit=self.scope.optional(entry.limit, (*at, "limit")),
            up_offset=None if entry.up_offset == "0" else code(entry.up_offset, (*at, "up_offset"), "float"),
            table=ir.WeightTable(
                f"{name}_weights",
                (*input_rows, *self._expert_rows(name, entry, at, layout, bias)),
                ".".join(map(str, at)),
            ),
            path=".".join(map(str, at)),
            why=entry.why,
            router_why=router.why,
        )

    def _router_input(
        self, name: str, router: models.Router, here: SpecPath
    ) -> tuple[tuple[ir.Statement, ...], list[ir.Row]]:
        statements: list[ir.Statement] = []
        rows: list[ir.Row] = []
        source = "x_TD"
        for index, step in enumerate(router.input):
            path = (*here, "input", index)
            where = ".".join(map(str, path))
            if isinstance(step, models.NormStep):
                if self.has_gain(step.norm):
                    message = "a norm with a gain is not implemented as a router's input"
                    self.problems.add(
                        "SPEC025", message, path, help="name a norm with `gain: none` and add a `gain` step"
                    )
                elif step.weight is not None:
                    message = f"the norm `{step.norm}` has no gain to use this weight"
                    self.problems.add(
                        "SPEC018", message, (*path, "weight"), help="remove it, or name a norm with a gain"
                    )
                norm = self.norm(step.norm, (*path, "norm"), "None")
                statements.append(ir.Statement("norm", "h_TD", source, where, norm=norm, comment=norm_why(step, norm)))
            elif isinstance(step, models.GainStep):
                role = f"{name}_input_gain"
                size = "d.hidden" if step.size is None else self.scope.code(step.size, (*path, "size"), prefix="d")
                rows.append(ir.Row(role, (size,), ((self.layers + step.gain, size),)))
                statements.append(ir.Statement("gain", "h_TD", source, where, weight=f"w.{role}", comment=step.why))
            elif isinstance(step, models.ScaleStep):
                value = self.scope.code(step.scale, (*path, "scale"), "float")
                statements.append(ir.Statement("scale", "h_TD", source, where, value=value, comment=step.why))
            else:
                help = "a router's input takes norm, gain and scale"
                self.problems.add("SPEC025", "this step is not implemented in a router's input", path, help=help)
            source = "h_TD"
        return tuple(statements), rows

    def _expert_rows(
        self, name: str, entry: models.Moe, at: SpecPath, layout: str, router_bias: bool | str
    ) -> list[ir.Row]:
        experts = self.scope.code(entry.experts, (*at, "experts"), prefix="d")
        size = self.scope.code(entry.size, (*at, "size"), prefix="d")
        router = entry.router
        rows = [ir.Row(f"{name}_router", (experts, "d.hidden"), ((self.module(router.weight), experts),))]
        rows += self.bias_row(router_bias, f"{name}_router_bias", [(self.module(router.weight, "bias"), experts)])
        if router.gain != "none":
            rows.append(ir.Row(f"{name}_expert_gain", (experts,), ((self.layers + router.gain, experts),)))
        wide = _double(size)
        gate_up, down = (
            ((wide, "d.hidden"), ("d.hidden", size)) if layout == "out_in" else (("d.hidden", wide), (size, "d.hidden"))
        )
        rows.append(ir.Row(f"{name}_gate_up", (experts, *gate_up), layouts=self._layouts(entry.gate_up, layout)))
        if entry.gate_up_bias != "none":
            rows.append(ir.Row(f"{name}_gate_up_bias", (experts, wide), ((self.layers + entry.gate_up_bias, experts),)))
        rows.append(ir.Row(f"{name}_down", (experts, *down), layouts=self._layouts(entry.down, layout)))
        if entry.down_bias != "none":
            rows.append(ir.Row(f"{name}_down_bias", (experts, "d.hidden"), ((self.layers + entry.down_bias, experts),)))
        return rows

    def _layouts(self, layouts: list, memory: str) -> tuple[str, ...]:
        found = []
        for layout in layouts:
            if isinstance(layout, models.StackedLayout):
                transpose = ", transpose=True" if _orientation(layout) != memory else ""
                found.append(f'Stacked("{self.layers}{layout.stacked}"{transpose})')
            elif isinstance(layout, models.PerExpertLayout):
                names = "".join(f'"{self.layers}{name}", ' for name in layout.per_expert)
                found.append(f"PerExpert(({names.rstrip() if len(layout.per_expert) == 1 else names.rstrip(', ')}))")
            else:
                found.append(f'Mxfp4("{self.layers}{layout.mxfp4}")')
        return tuple(found)

    def _memory_layout(self, entry: models.Moe, at: SpecPath) -> tuple[str, bool]:
        """-> ("out_in" or "in_out", whether gate and up are interleaved): the first stacked layout is memory's."""
        stacked = {}
        for field, layouts in (("gate_up", entry.gate_up), ("down", entry.down)):
            for index, layout in enumerate(layouts):
                self._check_layout(layout, field, (*at, field, index))
            first = next((layout for layout in layouts if isinstance(layout, models.StackedLayout)), None)
            if first is None:
                message = f"`{field}` lists no stacked layout, which is the one that memory uses"
                self.problems.add("SPEC022", message, (*at, field), key=True, help="add `{stacked: NAME, axes: […]}`")
                return "out_in", False
            stacked[field] = first
        if _orientation(stacked["gate_up"]) != _orientation(stacked["down"]):
            self.problems.add("SPEC022", "gate_up and down lie in memory in different orders of axes", (*at, "down", 0))
        return _orientation(stacked["gate_up"]), stacked["gate_up"].order == "interleaved"

    def _check_layout(self, layout: object, field: str, path: SpecPath) -> None:
        if isinstance(layout, models.StackedLayout):
            if sorted(layout.axes) != ["expert", "in", "out"] or layout.axes[0] != "expert":
                help = "write [expert, out, in] or [expert, in, out]"
                self.problems.add(
                    "SPEC022", f"axes {layout.axes} cannot be stacked experts", (*path, "axes"), help=help
                )
            if field == "gate_up" and layout.order not in ("interleaved", ["gate", "up"]):
                help = "write `order: [gate, up]` or `order: interleaved`"
                self.problems.add("SPEC022", "gate_up does not say how gate and up share the out axis", path, help=help)
            if field == "down" and layout.order is not None:
                self.problems.add(
                    "SPEC010", "`order` has no effect on down", (*path, "order"), key=True, help="remove it"
                )
        if isinstance(layout, models.PerExpertLayout):
            wanted = 2 if field == "gate_up" else 1
            if len(layout.per_expert) != wanted:
                message = f"{field} takes {wanted} tensor{'s' if wanted > 1 else ''} an expert, found {len(layout.per_expert)}"
                self.problems.add("SPEC022", message, (*path, "per_expert"))
            for index, name in enumerate(layout.per_expert):
                if name.count("*") != 1:
                    help = "write the expert's index as `*`"
                    self.problems.add("SPEC021", f"`{name}` needs one `*`", (*path, "per_expert", index), help=help)

    # ------------------------------------------------------------ once each

    def _once(self, section: str, name: str, build: object) -> object:
        key = (section, name)
        if key not in self._built:
            self.used.add(key)
            entry = getattr(self.model, section)[name]
            self._built[key] = build(name, entry, (section, name))  # type: ignore[operator]
        return self._built[key]

    def built(self, section: str) -> list:
        """The entries of a section that were used, in the spec's order."""
        order = list(getattr(self.model, section))
        return [self._built[section, name] for name in order if (section, name) in self._built]


def norm_why(step: models.NormStep, norm: ir.NormCall | None) -> str | None:
    """The comment of a norm's line: the step's own, else the norm's."""
    return step.why or (norm.why if norm else None)


def _double(size: str) -> str:
    return f"2 * {size}" if " " not in size else f"2 * ({size})"


def _orientation(layout: models.StackedLayout) -> str:
    return "out_in" if layout.axes[1:] == ["out", "in"] else "in_out"
