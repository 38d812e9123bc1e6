# Generated from specs/gpt_neox.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt_neox.yaml`.
"""Where adapters of gpt_neox land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear

MERGES: dict[str, Merge] = {
    "embed_in": merge_linear, "embed_out": merge_linear, "qkv": merge_linear, "o": merge_linear, "mlp_up": merge_linear,
    "mlp_down": merge_linear,
}
