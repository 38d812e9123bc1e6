# Generated from specs/cohere.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/cohere.yaml`.
"""Where adapters of cohere land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear

MERGES: dict[str, Merge] = {
    "embed_tokens": merge_linear, "lm_head": merge_linear, "qkv": merge_linear, "o": merge_linear,
    "mlp_gate_up": merge_linear, "mlp_down": merge_linear,
}
