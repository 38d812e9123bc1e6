# Generated from specs/qwen2_moe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen2_moe.yaml`.
"""Where adapters of qwen2_moe land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear, merge_stacked

MERGES: dict[str, Merge] = {
    "embed_tokens": merge_linear, "lm_head": merge_linear, "qkv": merge_linear, "o": merge_linear,
    "mlp_gate_up": merge_linear, "mlp_down": merge_linear, "shared_gate_up": merge_linear, "shared_down": merge_linear,
    "shared_out_gate": merge_linear, "moe_gate_up": merge_stacked, "moe_down": merge_stacked,
}
