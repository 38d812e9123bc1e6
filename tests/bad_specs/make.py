"""Writes the golden corpus: each case is a shipped spec with one mistake, and what `flexgen check` prints for it.

    python tests/bad_specs/make.py      # then review the diff of expected.txt as you would review code
"""

from __future__ import annotations

from pathlib import Path

from flexgen.assets import root
from flexgen.ir.resolve import resolve
from flexgen.spec.diagnostics import SpecError, render_text
from flexgen.spec.load import parse_spec
from flexgen.spec.source import split_lines

HERE = Path(__file__).parent

CASES: dict[str, tuple[str, str, str]] = {
    # what people write instead
    "number_of_heads": ("llama", "full: {heads: heads", "full: {heads: num_heads"),
    "dim_read_too_early": ("llama", "  heads: num_attention_heads", "  heads: num_attention_heads * kv_heads"),
    "weight_of_two_norms": ("llama", "weight: post_attention_layernorm", "weight: input_layernorm"),
    "module_of_two_projections": ("llama", "rope: rope, bias: attention_bias", "rope: rope, bias: attention_bias, q: self_attn.k_proj"),
    "misspelt_layout": ("qwen3_moe", "{stacked: mlp.experts.gate_up_proj", "{stackd: mlp.experts.gate_up_proj"),
    "misspelt_step": ("llama", "weight: input_layernorm", "wieght: input_layernorm"),
    "branch_without_list": ("llama", "add: [{norm: rms, weight: input_layernorm}, attention]", "add: attention"),
    "number_null_by_default": ("llama", "    mlp_bias: false", "    mlp_bias: false\n    intermediate_size: null"),
    "text_for_a_size": ("llama", "  hidden_size: ", "  hidden_size: big  # "),
    # file level
    "duplicate_key": ("llama", "  vocab: vocab_size\n", "  vocab: vocab_size\n  vocab: vocab_size\n"),
    "anchor": ("llama", "  rms: {kind", "  rms: &n {kind"),
    "tag": ("llama", "flexgen: 1", "flexgen: !!str 1"),
    "tab": ("llama", "  rms: {kind", "\trms: {kind"),
    "unclosed": ("llama", "kinds:\n  full: {attention: full}", "kinds:\n  full: {attention: full"),
    "two_documents": ("llama", "norms:", "---\nnorms:"),
    "comma_in_flow_text": ("gemma4_moe", 'why: "the value is the raw key projection, before its norm and rope"', "why: raw key, before its norm"),
    "summary_colon": ("llama", '"Llama and its relatives: pre-norm, rotary attention, gated MLP."', "Llama: pre-norm"),
    # shape
    "unknown_top_field": ("llama", "norms:", "norm:"),
    "unknown_field": ("gemma4_moe", "window: window, scale", "windw: window, scale"),
    "unknown_field_far": ("llama", "bias: attention_bias", "colour: attention_bias"),
    "missing_field": ("llama", "head_dim: head_dim, rope: rope", "rope: rope"),
    "missing_rope": ("llama", "rope: rope, bias", "bias"),
    "missing_section": ("llama", "embedding: {weight: embed_tokens}\n", ""),
    "wrong_version": ("llama", "flexgen: 1", "flexgen: 2"),
    "wrong_enum": ("llama", "cast: before", "cast: befor"),
    "wrong_kind": ("llama", "kind: rms", "kind: rmsnorm"),
    "wrong_act": ("llama", "size: size, act: silu", "size: size, act: silly"),
    "wrong_type_list": ("llama", "model_types: [llama]", "model_types: llama"),
    "wrong_type_mapping": ("llama", "  full: {heads", "  full: [heads"),
    "wrong_type_text": ("llama", "embedding: {weight: embed_tokens}", "embedding: {weight: 7}"),
    "wrong_type_number": ("llama", "size: size, act", "size: [1], act"),
    "wrong_type_entry": ("qwen3", "q_norm: rms", "q_norm: true"),
    "old_boolean": ("llama", "tied: tied", "tied: no"),
    "old_boolean_literal": ("llama", "{all: true", "{all: yes"),
    "quoted_boolean": ("llama", "{all: true", '{all: "true"'),
    "quoted_version": ("llama", "flexgen: 1", 'flexgen: "1"'),
    "null_value": ("llama", "  size: intermediate_size", "  size: null"),
    "bad_name": ("llama", "norms:\n  rms:", "norms:\n  RMS:"),
    "hostile_name": ("llama", "name: llama", "name: ../llama"),
    "code_name": ("llama", "name: llama", "name: __import__"),
    "bad_tensor": ("llama", "weight: input_layernorm", "weight: 'input layernorm'"),
    "quoted_tensor": ("llama", "weight: lm_head", "weight: 'lm_head\"'"),
    "brace_tensor": ("llama", "weight: embed_tokens", "weight: 'layers.{i}.embed'"),
    "empty_block": ("llama", "  - add: [{norm: rms, weight: input_layernorm}, attention]", "  - add: []"),
    "unknown_step": ("llama", "{norm: rms, weight: input_layernorm}", "{nrom: rms, weight: input_layernorm}"),
    "unknown_part": ("llama", "  - add: [{norm: rms, weight: input", "  - ad: [{norm: rms, weight: input"),
    # names
    "unknown_norm": ("llama", "add: [{norm: rms, weight: input", "add: [{norm: rsm, weight: input"),
    "unknown_rope": ("llama", "rope: rope, bias", "rope: ropes, bias"),
    "no_rope_defined": ("llama", "ropes:\n  rope: {parameters: rope_parameters, types: [default, linear, llama3, yarn]}\n", ""),
    "unknown_slot_entry": ("llama", "full: {attention: full}", "full: {attention: ful}"),
    "unknown_slot": ("llama", "full: {attention: full}", "full: {attention: full, feed: mlp}"),
    "missing_slot": ("qwen3_moe", "sparse: {attention: full, feed_forward: moe}", "sparse: {attention: full}"),
    "unknown_step_name": ("llama", "post_attention_layernorm}, mlp]", "post_attention_layernorm}, mpl]"),
    "schedule_kind": ("llama", "kind: full}", "kind: fulll}"),
    "schedule_rewrite": ("gemma4_e", "{sliding: sliding_shared, full", "{slidng: sliding_shared, full"),
    "schedule_two_selectors": ("llama", "{all: true, kind: full}", "{all: true, every: 2, kind: full}"),
    "schedule_no_selector": ("llama", "{all: true, kind: full}", "{kind: full}"),
    "schedule_no_kind": ("llama", "{all: true, kind: full}", "{all: true}"),
    "schedule_partial": ("llama", "{all: true, kind: full}", "{first: 2, kind: full}"),
    "like_unknown": ("qwen3", "like: full", "like: fool"),
    "like_cycle": ("qwen3", "sliding: {like: full, window: window}", "sliding: {like: sliding, window: window}"),
    "like_other_section": ("gemma4_moe", "bare: {like: rms", "bare: {like: mlp"),
    "expression_unknown": ("llama", "kv_heads: kv_heads, head_dim", "kv_heads: kv_head, head_dim"),
    "expression_syntax": ("llama", "hidden // heads", "hidden // / heads"),
    "expression_power": ("gemma4_moe", "scale: sqrt(hidden)", "scale: hidden ** 2"),
    "expression_call": ("gemma4_moe", "scale: sqrt(hidden)", "scale: exec(hidden)"),
    "expression_or": ("gemma4_moe", "scale: sqrt(hidden)", "scale: hidden or 2"),
    "expression_float_size": ("llama", "size: intermediate_size", "size: intermediate_size / 2"),
    "expression_deep": ("llama", "hidden // heads", "(" * 40 + "hidden" + ")" * 40),
    "flag_and_number": ("llama", "mlp: {size: size, act: silu, bias: mlp_bias}", "mlp: {size: mlp_bias, act: silu, bias: mlp_bias}"),
    "flag_expression": ("llama", "bias: attention_bias}", "bias: 1 + 1}"),
    "missing_dim": ("llama", "  hidden: hidden_size\n", ""),
    # meaning
    "unused_dim": ("llama", "  tied: tie_word_embeddings\n", "  tied: tie_word_embeddings\n  spare: spare_field\n"),
    "unused_norm": ("llama", "norms:\n", "norms:\n  spare: {kind: rms, cast: after, eps: eps}\n"),
    "unused_attention": ("llama", "attention:\n", "attention:\n  spare: {like: full, window: 4}\n"),
    "unused_kind": ("llama", "kinds:\n", "kinds:\n  spare: {attention: full}\n"),
    "norm_without_weight": ("llama", "{norm: rms, weight: input_layernorm}", "{norm: rms}"),
    "weight_without_gain": ("gemma4_moe", "{norm: bare}", "{norm: bare, weight: router.norm}"),
    "branch_changes_width": ("gemma4_e", "{linear: per_layer_projection, size: hidden}", "{linear: per_layer_projection, size: input_size}"),
    "kv_of_norm": ("gemma4_e", "kv_of: sliding, k_norm: none", "kv_of: sliding, k_norm: rms"),
    "kv_of_geometry": ("gemma4_e", "{like: sliding, kv_of: sliding", "{like: sliding, head_dim: full_head_dim, kv_of: sliding"),
    "norm_not_implemented": ("qwen3_5", "gain: one_plus, cast: after", "gain: one_plus, cast: before"),
    "expert_order_missing": ("qwen3_moe", ", order: [gate, up]", ""),
    "expert_axes": ("qwen3_moe", "axes: [expert, out, in], order", "axes: [out, expert, in], order"),
    "expert_no_stacked": ("gemma4_moe", "down: [{stacked: experts.down_proj, axes: [expert, out, in]}]", 'down: [{per_expert: ["experts.*.down.weight"]}]'),
    "expert_no_star": ("qwen3_moe", '"mlp.experts.*.down_proj.weight"', '"mlp.experts.down_proj.weight"'),
    "router_no_score": ("qwen3_moe", "score: softmax, ", ""),
    "scale_dtype_alone": ("llama", "embedding: {weight: embed_tokens}", "embedding: {weight: embed_tokens, scale_dtype: model}"),
    "linear_without_size": ("gemma4_e", "{linear: per_layer_input_gate, size: input_size}", "{linear: per_layer_input_gate}"),
    "like_cycle_of_two": ("gemma4_dense", "rms: {kind: rms, cast: after, eps: eps}", "rms: {like: bare}"),
    "like_misspelt_definition": ("qwen3", "attention:\n  full:", "attention:\n  fulll:"),
    "misspelt_dim": ("llama", "  heads: num_attention_heads", "  haeds: num_attention_heads"),
    "misspelt_required_dim": ("llama", "  hidden: hidden_size", "  hiden: hidden_size"),
    "default_or_float": ("llama", "head_dim or hidden // heads", "head_dim or hidden / heads"),
    "heads_do_not_divide": ("qwen3", "sliding: {like: full, window", "sliding: {like: full, heads: 6, kv_heads: 4, window"),
    "rope_none_leaves_rope_unused": ("llama", "rope: rope, bias", "rope: none, bias"),
    "keyword_name": ("llama", "name: llama", "name: class"),
    "keyword_entry": ("llama", "norms:\n", "norms:\n  lambda: {like: rms}\n"),
    "name_of_generated_code": ("llama", "  layers: num_hidden_layers", "  config: num_hidden_layers\n  layers: config"),
    "two_weights_of_one_name": ("llama", "weight: input_layernorm", "weight: o"),
    "head_weight_without_gain": ("gemma4_dense", "head: {norm: {norm: rms,", "head: {norm: {norm: bare,"),
    "idle_norm_weight": ("llama", "rope: rope, bias", "rope: rope, q_norm_weight: q_layernorm, bias"),
    "idle_value": ("gemma4_dense", "value: from_key,", "value: from_key, v: self_attn.value,"),
    "idle_size": ("gemma4_e", "{linear: per_layer_model_projection}", "{linear: per_layer_model_projection, size: hidden}"),
    "listed_twice": ("llama", "model_types: [llama]", "model_types: [llama, llama]"),
    "fp32_of_nothing": ("llama", "  prefix: [model]", "  prefix: [model]\n  fp32: [norm]"),
    "layers_without_star": ("llama", "  prefix: [model]", "  prefix: [model]\n  layers: layers"),
    "star_in_module": ("llama", "weight: input_layernorm", "weight: 'input.*.norm'"),
    "default_unread": ("llama", "    mlp_bias: false", "    mlp_bais: false"),
    "default_of_wrong_type": ("llama", "    mlp_bias: false", "    mlp_bias: 0"),
    "default_rope_parameter": ("llama", "{rope_theta: 10000.0}\n  require", "{rope_thta: 10000.0}\n  require"),
    "require_unknown": ("llama", "require: {hidden_act: silu}", "require: {hiden_act: silu}"),
    "require_of_wrong_shape": ("gemma4_e", "num_kv_shared_layers: {min: 1}", "num_kv_shared_layers: {max: 1}"),
    "require_and_ignore": ("llama", "ignore: [pretraining_tp]", "ignore: [pretraining_tp, hidden_act]"),
    "ignored_and_read": ("llama", "ignore: [pretraining_tp]", "ignore: [pretraining_tp, mlp_bias]"),
    "tiny_other_model_type": ("llama", "  model_type: llama", "  model_type: lama"),
    "tiny_unread_field": ("llama", "  vocab_size: 211", "  vocab_size: 211\n  num_experts: 8"),
    "tiny_misspelt_field": ("llama", "  intermediate_size: 96", "  intermediate_sise: 96"),
    "dim_of_misspelt_field": ("llama", "size: intermediate_size", "size: intermediate_sise"),
    "dim_of_misspelt_field_of_many": ("llama", "num_key_value_heads or heads", "num_key_value_headz or heads"),
    "dim_of_misspelt_default": ("llama", "  eps: rms_norm_eps", "  eps: rms_norm_epz"),
    "dim_of_field_given_twice": ("gemma4_dense", "  window: sliding_window", "  window: sliding_windw"),
    "tiny_lacks_field_near_another": ("gemma4_dense", "  head_dim: 16\n", ""),
    "default_ruled_out": ("llama", "    hidden_act: silu", "    hidden_act: gelu"),
    "tiny_lacks_field": ("llama", "  intermediate_size: 96\n", ""),
    "tiny_wrong_type": ("llama", "  num_hidden_layers: 3", '  num_hidden_layers: "3"'),
    "tiny_breaks_fence": ("gemma4_moe", "  attention_k_eq_v: true\n  hidden", "  attention_k_eq_v: false\n  hidden"),
    "tiny_heads": ("llama", "  num_key_value_heads: 2", "  num_key_value_heads: 3"),
    "tiny_rope_type": ("gpt_oss", "{rope_type: yarn,", "{rope_type: llama3,"),
    "tiny_rope_lacks": ("llama", "factor: 4.0, low_freq_factor: 1.0,", "factor: 4.0,"),
    "tiny_without_layers": ("llama", "  num_hidden_layers: 3", "  num_hidden_layers: 0"),
    "tiny_unknown_layer_type": ("qwen3_5", "layer_types: [linear_attention, linear", "layer_types: [linear_atention, linear"),
    "tiny_kind_missing": ("gemma4_e", "  num_kv_shared_layers: 3", "  num_kv_shared_layers: 1"),
    "schedule_field_unknown": ("qwen3_moe", "when: use_sliding_window", "when: use_slding_window"),
    "schedule_value_unknown": ("gpt_oss", "{sliding_attention: sliding, full", "{sliding_attentoin: sliding, full"),
    "times_unknown": ("gemma4_e", "{times: per_layer}", "{times: per_layr}"),
}


def verdict(name: str) -> str:
    """What checking a case prints."""
    spec, good, bad = CASES[name]
    text = (root("specs") / f"{spec}.yaml").read_text()
    assert good in text, name
    broken = text.replace(good, bad, 1)
    path = f"{name}.yaml"
    try:
        resolve(parse_spec(broken, path))
    except SpecError as error:
        return render_text(error.diagnostics, {path: split_lines(broken)})
    return "accepted\n"


def main() -> None:
    parts = [f"=== {name}\n{verdict(name)}" for name in CASES]
    (HERE / "expected.txt").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
