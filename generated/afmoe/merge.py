# Generated from specs/afmoe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/afmoe.yaml`.
"""Where adapters of afmoe land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear, merge_stacked

MERGES: dict[str, Merge] = {
    "embed_tokens": merge_linear, "lm_head": merge_linear, "qkv": merge_linear, "o": merge_linear, "gate": merge_linear,
    "mlp_gate_up": merge_linear, "mlp_down": merge_linear, "shared_gate_up": merge_linear, "shared_down": merge_linear,
    "moe_gate_up": merge_stacked, "moe_down": merge_stacked,
}
