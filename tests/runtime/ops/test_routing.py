"""Routers beyond top-k of a softmax, and experts beyond a gated pair, against transformers' own modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.phimoe.modeling_phimoe import sparsemixer as their_sparsemixer

from flexgen.contract.heads import check_groups
from flexgen.errors import ConfigError
from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops.experts import experts, keep_groups, renormalise, sparsemixer, top_k


def by_expert(weights, chosen):
    """Sorted by expert: the order of a token's experts says nothing."""
    order = chosen.argsort(-1)
    return weights.gather(1, order), chosen.gather(1, order)


@pytest.mark.parametrize("groups, keep", [(1, 1), (4, 2), (4, 4), (6, 1)])
def test_biased_choices_among_groups(groups, keep):
    torch.manual_seed(1)
    sizes = {"num_local_experts": 12, "num_experts_per_tok": 2, "hidden_size": 6, "n_group": groups, "topk_group": keep}
    router = Glm4MoeTopkRouter(SimpleNamespace(**sizes, routed_scaling_factor=2.5, norm_topk_prob=True))
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_()
    x = torch.randn(50, 6)
    _, weights, chosen = router(x)
    scores = F.linear(x, router.weight).sigmoid()
    _, ids = top_k(keep_groups(scores + router.e_score_correction_bias, groups, keep, best=2), 2)
    ours = renormalise(scores.gather(1, ids), True, eps=1e-20) * 2.5
    for mine, theirs in zip(by_expert(ours, ids), by_expert(weights, chosen)):
        torch.testing.assert_close(mine, theirs)


def test_groups_ranked_by_their_best_score():
    torch.manual_seed(2)
    scores = torch.rand(40, 12)
    kept = keep_groups(scores, 3, 2, best=1).unflatten(1, (3, 4))
    worst = scores.unflatten(1, (3, 4)).amax(-1).argmin(-1)
    assert torch.equal(kept.isinf().all(-1).nonzero()[:, 1], worst) and kept.isinf().any(-1).sum() == 40


@pytest.mark.parametrize("jitter", [0.01, 0.2])
def test_sparsemixer_is_theirs(jitter):
    torch.manual_seed(3)
    scores = torch.randn(200, 6) / 4
    scores[:20] = scores[:20].abs()
    weights, chosen = their_sparsemixer(scores, jitter, training=False)
    _, ids = top_k(scores, 2)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(sparsemixer(scores, ids, jitter), weights)


def test_sums_that_weights_are_divided_by():
    weights = torch.tensor([[0.1, 0.3], [0.0, 0.0]])
    torch.testing.assert_close(renormalise(weights, True, eps=0.1), weights / torch.tensor([[0.5], [0.1]]))
    torch.testing.assert_close(renormalise(weights, True, floor=0.5), weights / torch.tensor([[0.5], [0.5]]))
    assert renormalise(weights, False, eps=0.1) is weights


def test_the_weight_on_what_an_expert_reads():
    torch.manual_seed(4)
    sizes = SimpleNamespace(num_local_experts=5, intermediate_size=16, hidden_size=24, hidden_act="silu")
    module = Llama4TextExperts(sizes)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    x, logits = torch.randn(9, 24), torch.randn(9, 5)
    values, chosen = top_k(logits, 2)
    spread = torch.full_like(logits, -torch.inf).scatter(1, chosen, values).sigmoid()
    theirs = module(x.repeat(5, 1) * spread.T.reshape(-1, 1)).view(5, 9, 24).sum(0)
    ours = experts(
        x, values.sigmoid(), chosen, module.gate_up_proj, module.down_proj, layout="in_out", weights_on="input"
    )
    torch.testing.assert_close(ours, theirs)
    on_output = experts(x, values.sigmoid(), chosen, module.gate_up_proj, module.down_proj, layout="in_out")
    assert (on_output - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("biased", [False, True])
def test_experts_without_a_gate(biased):
    torch.manual_seed(5)
    up, down = torch.randn(4, 16, 24) / 5, torch.randn(4, 24, 16) / 5
    biases = {"gate_up_bias": torch.randn(4, 16), "down_bias": torch.randn(4, 24)} if biased else {}
    x, (weights, chosen) = torch.randn(9, 24), top_k(torch.rand(9, 4), 2)
    got = experts(x, weights, chosen, up, down, act="relu", layout="out_in", gated=False, **biases)
    for token in range(9):
        wanted = torch.zeros(24)
        for weight, expert in zip(weights[token], chosen[token].tolist()):
            h = F.linear(x[token], up[expert], biases["gate_up_bias"][expert] if biased else None).relu()
            wanted += weight * F.linear(h, down[expert], biases["down_bias"][expert] if biased else None)
        torch.testing.assert_close(got[token], wanted)
    held = moe.ExpertWeights(up, down, "out_in", False, biases.get("gate_up_bias"), biases.get("down_bias"))
    gate = moe.Gate("relu", gated=False)
    torch.testing.assert_close(moe.grouped(x, chosen, held, gate), moe.each(x, chosen, held, gate))


DECLINED = {
    "no gate": moe.Gate("relu", gated=False),
    "an activation that no kernel has": moe.Gate("sigmoid"),
}
SERVED = {name: moe.Gate(name) for name in ("silu", "gelu", "gelu_tanh", "relu")} | {"alpha": moe.Gate("sigmoid", alpha=1.7)}


@pytest.mark.parametrize("name", [*DECLINED, *SERVED])
def test_kernels_serve_or_decline_by_the_gate(name):
    x, gate = torch.zeros(3, 24).bfloat16(), {**DECLINED, **SERVED}[name]
    inner = 16 if gate.gated else 32
    weights = moe.ExpertWeights(torch.zeros(4, 32, 24).bfloat16(), torch.zeros(4, 24, inner).bfloat16(), "out_in")
    assert moe.choose(x, weights, gate) is (moe.routed if name in SERVED else moe.grouped)


def test_routing_traces_as_one_graph_with_dynamic_lengths():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def route(logits, bias):
        scores = logits.sigmoid()
        _, ids = top_k(keep_groups(scores + bias, 4, 2, best=2), 2)
        return renormalise(scores.gather(1, ids), True, 1e-20, 0.1) + sparsemixer(logits, top_k(logits, 2)[1], 0.1), ids

    for tokens in (3, 7):
        logits, bias = torch.randn(tokens, 12), torch.randn(12)
        for ours, eager in zip(route(logits, bias), route._torchdynamo_orig_callable(logits, bias)):
            torch.testing.assert_close(ours, eager)


def test_groups_that_cannot_be_are_refused():
    sizes = {"experts": 12, "groups": 4, "keep": 2, "best": 2, "top_k": 6}
    check_groups("moe.moe", **sizes)
    for change, message in (
        ({"groups": 5}, "12 experts do not make 5 equal groups"), ({"groups": 0}, "0 equal groups"),
        ({"keep": 5}, "5 of 4 groups"), ({"keep": 0}, "0 of 4 groups"), ({"groups": 12}, "a group of 1 experts"),
        ({"top_k": 7}, "2 groups of 3 experts are kept, and a token chooses 7"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"moe.moe: .*{message}"):
            check_groups("moe.moe", **{**sizes, **change})


def test_equals_are_weighed_in_their_order_by_sparsemixer():
    """In 16 bits scores are often equal: which of them comes first decides both weights."""
    scores_TE = torch.randint(0, 3, (200, 6), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    theirs, chosen = their_sparsemixer(scores_TE, 0.1, training=False)
    _, experts_TK = top_k(scores_TE, 2, by_order=True)
    assert torch.equal(experts_TK, chosen)
    assert torch.equal(sparsemixer(scores_TE, experts_TK, 0.1), theirs)
