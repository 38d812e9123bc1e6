# Generated from specs/falcon.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/falcon.yaml`.
"""Where adapters of falcon land: the weights that they may change, whose rows name the modules, and what merges them."""

from flexgen.runtime.loading.lora import Merge, merge_linear

MERGES: dict[str, Merge] = {
    "word_embeddings": merge_linear, "lm_head": merge_linear, "qkv": merge_linear, "o": merge_linear,
    "mlp_up": merge_linear, "mlp_down": merge_linear,
}
