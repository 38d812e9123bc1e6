# Generated from specs/mimo_v2_flash.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/mimo_v2_flash.yaml`.
"""Where adapters of mimo_v2_flash land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear, merge_stacked

MERGES: dict[str, Merge] = {
    "embed_tokens": merge_linear, "lm_head": merge_linear, "q": merge_linear, "k": merge_linear, "v": merge_linear,
    "o": merge_linear, "mlp_gate_up": merge_linear, "mlp_down": merge_linear, "moe_gate_up": merge_stacked,
    "moe_down": merge_stacked,
}
