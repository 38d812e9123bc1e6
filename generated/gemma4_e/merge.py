# Generated from specs/gemma4_e.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_e.yaml`.
"""Where adapters of gemma4_e land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear

MERGES: dict[str, Merge] = {
    "embed_tokens": merge_linear, "per_layer_model_projection": merge_linear, "embed_tokens_per_layer": merge_linear,
    "lm_head": merge_linear, "per_layer_input_gate": merge_linear, "per_layer_projection": merge_linear,
    "qkv": merge_linear, "o": merge_linear, "q": merge_linear, "mlp_gate_up": merge_linear, "mlp_down": merge_linear,
    "wide_gate_up": merge_linear, "wide_down": merge_linear,
}
