"""The lines of a router: from what it reads to its scores, from those to each token's experts and their weights."""

from __future__ import annotations

from typing import Any

from flexgen.contract.heads import BEST
from flexgen.ir import architecture as ir
from flexgen.ir.code import Size, number
from flexgen.ir.rows import Flag
from flexgen.ir.shared import Shared, bias, norm_why
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

Lines = tuple[ir.Statement, ...]


def route(
    shared: Shared, name: str, entry: models.Moe, at: SpecPath
) -> tuple[Lines, str, list[ir.Row]]:
    """-> the lines of a router, code of the weights that it returns, and the rows of the weights that its lines read."""
    router, here = entry.router, (*at, "router")
    has_bias = shared.scope.flag(router.bias, (*here, "bias"))
    _check_fields(shared, router, here)
    cap = shared.scope.optional(router.softcap, (*here, "softcap"))
    lines, rows = _input(shared, name, router, here)
    scores = _scores(name, router, here, "h_TD" if lines else "x_TD", bias(has_bias, f"{name}_router"), cap)
    choice, source, choice_rows = _choice(shared, name, entry, here)
    chosen = _chosen(shared, name, entry, here, source)
    weights, gain_rows = _weights(shared, name, entry, here)
    returned = "weights_TK.float()" if router.dtype == "fp32" else "weights_TK.to(x_TD.dtype)"
    rows = [*rows, _row(shared, name, entry, at, has_bias), *choice_rows, *gain_rows]
    return (*lines, *scores, *choice, *chosen, *weights), returned, rows


def _row(shared: Shared, name: str, entry: models.Moe, at: SpecPath, has_bias: Flag) -> ir.Row:
    count = shared.scope.code(entry.experts, (*at, "experts"))
    top_k = shared.scope.code(entry.top_k, (*at, "top_k"))
    scores = [(entry.router.weight, count)]
    return shared.rows.router(f"{name}_router", scores, shared.hidden, f"{name}_routed", top_k, bias=has_bias)


def _line(out: str, code: str, path: SpecPath) -> ir.Statement:
    return ir.Statement("code", out, "", show_path(path), value=code)


def _scores(name: str, router: models.Router, here: SpecPath, source: str, has_bias: str | None, cap: Size | None) -> list[ir.Statement]:
    wide = ".float()" if router.compute == "fp32" else ""
    arguments = [source + wide, f"w.{name}_router{wide}", *([has_bias + wide] if has_bias else [])]
    lines = [_line("scores_TE", f"project({', '.join(arguments)})", (*here, "weight"))]
    capped = [] if cap is None else [_line("scores_TE", f"softcap(scores_TE.float(), {cap})", (*here, "softcap"))]
    turned = {
        "softmax": "torch.softmax(scores_TE, dim=-1, dtype=torch.float32)",
        "sigmoid": "torch.sigmoid(scores_TE)" if wide else "torch.sigmoid(scores_TE.float())",
    }.get(router.score)
    return lines + capped + ([_line("scores_TE", turned, (*here, "score"))] if turned else [])


def _choice(shared: Shared, name: str, entry: models.Moe, here: SpecPath) -> tuple[list[ir.Statement], str, list[ir.Row]]:
    """-> lines from scores to what the choice is made of, its variable, and the rows that the lines read."""
    router, lines, rows, source = entry.router, [], [], "scores_TE"
    if router.choice_bias != "none":
        count = shared.scope.code(entry.experts, (*here[:-1], "experts"))
        role, is_row = f"{name}_choice_bias", router.choice_bias_axes == "one_expert"
        shape, axes = ([number(1), count], ["", "experts"]) if is_row else ([count], ["experts"])
        rows.append(shared.rows.bias(role, shape, router.choice_bias, axes))
        lines.append(_line("choice_TE", f"{source} + w.{role}", (*here, "choice_bias")))
        source = "choice_TE"
    if isinstance(router.groups, models.RouterGroups):
        at = (*here, "groups")
        sizes = [shared.scope.code(getattr(router.groups, field), (*at, field)) for field in ("count", "keep")]
        best = BEST[router.groups.rank]
        lines.append(_line("choice_TE", f"keep_groups({source}, {sizes[0]}, {sizes[1]}, best={best})", at))
        source = "choice_TE"
    return lines, source, rows


def _chosen(shared: Shared, name: str, entry: models.Moe, here: SpecPath, source: str) -> list[ir.Statement]:
    top_k = shared.scope.code(entry.top_k, (*here[:-1], "top_k"))
    by_order = ", by_order=True" if entry.router.after_top_k == "sparsemixer" else ""  # it weighs the first of equals first
    found = f"top_k({source}, {top_k}, w.{name}_routed{by_order})"
    if entry.router.choice_bias == "none":
        return [_line("weights_TK, experts_TK", found, (*here[:-1], "top_k"))]
    gathered = _line("weights_TK", "scores_TE.gather(1, experts_TK)", (*here, "choice_bias"))
    return [_line("_, experts_TK", found, (*here[:-1], "top_k")), gathered]


def _weights(shared: Shared, name: str, entry: models.Moe, here: SpecPath) -> tuple[list[ir.Statement], list[ir.Row]]:
    """Lines from the values of the chosen to the weights that multiply, and the rows that they read."""
    router, scope, lines, rows = entry.router, shared.scope, [], []
    jitter = scope.optional(router.jitter, (*here, "jitter"))
    turned = {
        "softmax": "torch.softmax(weights_TK, dim=-1)",
        "sigmoid": "torch.sigmoid(weights_TK.float())",
        "sparsemixer": f"sparsemixer(scores_TE, experts_TK, {jitter})",
    }.get(router.after_top_k)
    if turned:
        lines.append(_line("weights_TK", turned, (*here, "after_top_k")))
    normalise = scope.flag(router.normalise, (*here, "normalise"))
    if normalise is not False:
        options = [f"{field}={scope.code(text, (*here, f'normalise_{field}'), 'float')}" for field, text in _sums(router)]
        lines.append(_line("weights_TK", f"renormalise({', '.join(['weights_TK', str(normalise), *options])})", (*here, "normalise")))
    if router.scale != "1":
        factor = scope.code(router.scale, (*here, "scale"), "float")
        lines.append(ir.Statement("scale", "weights_TK", "weights_TK", show_path((*here, "scale")), value=factor))
    if router.gain != "none":
        count = scope.code(entry.experts, (*here[:-1], "experts"))
        rows.append(shared.rows.vector(f"{name}_expert_gain", count, router.gain, of="experts"))
        lines.append(_line("weights_TK", f"weights_TK * w.{name}_expert_gain[experts_TK]", (*here, "gain")))
    return lines, rows


def _sums(router: models.Router) -> list[tuple[str, str]]:
    """What is done to the sum that weights are divided by."""
    return [(field, text) for field, text in (("eps", router.normalise_eps), ("floor", router.normalise_floor)) if text != "0"]


def _check_fields(shared: Shared, router: models.Router, here: SpecPath) -> None:
    """Report fields that other fields leave without effect, and what is missing beside them."""
    if router.score == "none" and router.after_top_k == "none":
        message = "the router turns its logits into weights nowhere"
        shared.problems.add("SPEC005", message, here, key=True, help="set `score` or `after_top_k`")
    if router.after_top_k == "sparsemixer" and router.jitter == "none":
        shared.problems.add("SPEC005", "`sparsemixer` needs its `jitter`", here, key=True, help="add `jitter: DIM`")
    idle = {
        "jitter": ("none", router.after_top_k != "sparsemixer", "only `sparsemixer` has one"),
        "choice_bias_axes": ("expert", router.choice_bias == "none", "there is no `choice_bias`"),
        "normalise_eps": ("0", router.normalise == "false", "nothing is normalised"),
        "normalise_floor": ("0", router.normalise == "false", "nothing is normalised"),
    }
    for field, (default, is_idle, reason) in idle.items():
        if is_idle and getattr(router, field) != default:
            message = f"`{field}` has no effect: {reason}"
            shared.problems.add("SPEC010", message, (*here, field), key=True, help="remove it")


def _input(
    shared: Shared, name: str, router: models.Router, here: SpecPath
) -> tuple[list[ir.Statement], list[ir.Row]]:
    """The lines between what the router reads and its scores, and the weights that they use."""
    statements: list[ir.Statement] = []
    rows: list[ir.Row] = []
    for index, step in enumerate(router.input):
        path = (*here, "input", index)
        fields: dict[str, Any] = {"comment": getattr(step, "why", None)}
        if isinstance(step, models.NormStep):
            op, norm = "norm", _input_norm(shared, step, path)
            fields = {"norm": norm, "comment": norm_why(step, norm)}
        elif isinstance(step, models.GainStep):
            op, role = "gain", f"{name}_input_gain"
            size = shared.hidden if step.size is None else shared.scope.code(step.size, (*path, "size"))
            rows.append(shared.rows.vector(role, size, step.gain))
            fields["weight"] = f"w.{role}"
        elif isinstance(step, models.ScaleStep):
            op = "scale"
            fields["value"] = shared.scope.code(step.scale, (*path, "scale"), "float")
        else:
            help = "a router's input takes norm, gain and scale"
            shared.problems.add("SPEC025", "this step is not implemented in a router's input", path, help=help)
            continue
        source = "h_TD" if index else "x_TD"
        statements.append(ir.Statement(op, "h_TD", source, show_path(path), **fields))
    return statements, rows


def _input_norm(shared: Shared, step: models.NormStep, path: SpecPath) -> ir.NormCall | None:
    if shared.has_gain(step.norm):
        message = "a norm with a gain is not implemented as a router's input"
        help = "name a norm with `gain: none` and add a `gain` step"
        shared.problems.add("SPEC025", message, path, help=help)
    elif step.weight is not None:
        message = f"the norm `{step.norm}` has no gain to use this weight"
        help = "remove it, or name a norm with a gain"
        shared.problems.add("SPEC018", message, (*path, "weight"), help=help)
    return shared.norm(step.norm, (*path, "norm"), "None")
