"""Figures of vLLM 0.26.0 on the same workloads: one H200, torch 2.11, bf16, its defaults, random weights, measured 2026-11-30.

gpt-oss-20b's are loose upper figures: its dummy weights sent all tokens to the same experts. By vLLM's rule the state of
qwen3.6-35b-a3b was bf16: it takes config.json's mamba_ssm_dtype, else the model's dtype, and the measured config had none.
"""

VLLM: dict[str, dict[tuple[str, int], float]] = {
    "qwen3-30b-a3b": {
        ("decode", 1): 241.6,
        ("decode", 8): 878.2,
        ("decode", 16): 1252.7,
        ("decode", 32): 1992.9,
        ("decode", 48): 2733.0,
        ("decode", 64): 3534.6,
    },
    "llama-8b": {
        ("decode", 1): 201.4,
        ("decode", 8): 1584.4,
        ("decode", 16): 3058.4,
        ("decode", 32): 5752.2,
        ("decode", 48): 8148.2,
        ("decode", 64): 10564.8,
        ("rollout", 256): 14469.9,
    },
    "gemma4-26b-a4b": {
        ("decode", 1): 231.2,
        ("decode", 8): 984.7,
        ("decode", 48): 3186.3,
        ("decode", 64): 4070.7,
        ("rollout", 256): 7857.5,
    },
    "qwen3.6-35b-a3b": {
        ("decode", 1): 215.4,
        ("decode", 8): 1014.2,
        ("decode", 48): 2792.2,
        ("decode", 64): 3390.6,
        ("rollout", 256): 8605.2,
    },
    "gpt-oss-20b": {("decode", 1): 311.0, ("decode", 8): 2348.0, ("decode", 48): 9839.0, ("decode", 64): 12494.0},
}

VLLM["qwen3.6-35b-a3b-bf16-state"] = VLLM["qwen3.6-35b-a3b"]

VLLM_STARTUP_SECONDS = {
    "qwen3-30b-a3b": "155",
    "llama-8b": "55 to 73",
    "gpt-oss-20b": "74",
    "gemma4-26b-a4b": "122",
    "qwen3.6-35b-a3b": "78 to 109",
}
"""Compilation and capture included."""
