"""The sampling kernel against `sampler.finish`, on a host through Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

else:
    from flexgen.runtime.sampling import kernel as sampling
    from flexgen.runtime.sampling import sampler
    from flexgen.runtime.sampling.randoms import exponential_noise

    def rows(count, vocab, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        logits = (3 * torch.randn(count, vocab, generator=generator)).to(dtype)
        temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 1.0])[:count]
        seeds = torch.tensor([5, -(2**62), 2**61 + 7, 0, -1])[:count]
        return logits, temperature, seeds, torch.tensor([1, 7, 2**33, 0, 40])[:count]

    def same(ours, theirs):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])
        torch.testing.assert_close(ours[1], theirs[1], atol=2e-6, rtol=1e-6)
        assert (ours[3] is None) == (theirs[3] is None)
        if ours[3] is not None:
            torch.testing.assert_close(ours[3], theirs[3], atol=2e-6, rtol=1e-6)

    @pytest.mark.parametrize("vocab, real", [(11, 11), (4096, 4096), (4097, 4090), (9001, 9001)])
    @pytest.mark.parametrize("random", [False, True])
    @pytest.mark.parametrize("keep", [False, True])
    def test_tokens_logprobs_and_ranks(vocab, real, random, keep):
        inputs = rows(5, vocab)
        for divide in {False, random}:
            arguments = (*inputs, real, random, divide, keep)
            same(sampling.finish(*arguments), sampler.finish(*arguments))

    def test_bf16_and_columns_of_wider_tables():
        logits, temperature, seeds, lengths = rows(3, 500, torch.bfloat16)
        wide = torch.stack((temperature, temperature + 1), dim=1)[:, 0]
        arguments = (logits, wide, torch.stack((seeds, seeds), dim=1)[:, 1], lengths, 480, True, True, False)
        ours, theirs = sampling.finish(*arguments), sampler.finish(*arguments)
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])

    def test_noise_is_that_of_the_reference():
        seeds, lengths = torch.tensor([3, -9]), torch.tensor([2, 5])
        flat = torch.zeros(2, 5000)
        token, *_ = sampling.finish(flat, torch.ones(2), seeds, lengths, 5000, True, True, False)
        assert torch.equal(token, (-exponential_noise(seeds, lengths, 5000).log()).argmax(-1))

    def test_masked_tokens_are_never_drawn_and_what_has_no_probability_is_nan():
        logits = torch.full((3, 5000), float("-inf"))
        logits[0, [7, 4999]] = 1.0
        logits[1, 12] = float("nan")
        arguments = (logits, torch.ones(3), torch.arange(3), torch.arange(3), 5000, True, True, False)
        tokens, logprobs, _, _ = sampling.finish(*arguments)
        assert tokens[0] in (7, 4999) and ((tokens >= 0) & (tokens < 5000)).all()
        assert abs(logprobs[0] + 0.6931) < 1e-4 and logprobs[1].isnan() and logprobs[2].isnan()
