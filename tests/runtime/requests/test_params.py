"""SamplingParams refuse what they cannot do, by field, value and range."""

import math
import re

import pytest

from flexgen.runtime.requests.params import SamplingParams, StructuredOutputsParams

BAD = {
    "n": [0, -1, 1.5, True, 20000],
    "presence_penalty": [-2.1, 2.1, math.nan, "1"],
    "frequency_penalty": [-2.1, 2.1, None],
    "repetition_penalty": [0, -1, math.inf, 1e39],
    "temperature": [-0.1, math.nan, math.inf, 1e39, "hot"],
    "top_p": [0, 1.01, -1],
    "top_k": [-2, 1.5, 2**63],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, 1.5, "a"],
    "stop": ["", ["a", ""], [1], 3],
    "stop_token_ids": [[-1], ["a"], [True], 3, "3"],
    "max_tokens": [0, -1, 2.5],
    "min_tokens": [-1, 2**63],
    "logprobs": [-2, 1.5, True],
    "prompt_logprobs": [-2],
    "logit_bias": [{1: math.nan}, {-1: 1.0}, {"a": 1.0}, {1: 1e39}, [1]],
    "allowed_token_ids": [[], [-3], 3],
    "bad_words": ["word", [""], 3],
    "logits_processors": [[3], "f", 3, len],
    "return_routed_experts": [1, "no"],
    "ignore_eos": [1, None],
    "detokenize": ["yes"],
    "output_kind": ["delta"],
    "structured_outputs": [{"regex": "a"}],
}


@pytest.mark.parametrize("field, value", [(f, v) for f, values in BAD.items() for v in values])
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ValueError, match=re.escape(field)):
        SamplingParams(**{field: value})


def test_fields_set_later_are_checked_too():
    params = SamplingParams()
    params.top_p = 3
    with pytest.raises(ValueError, match=r"top_p=3 is out of range: it must be in \(0, 1\]"):
        params.validate()


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0"),
        ({"stop": "x", "detokenize": False}, "detokenize=False"),
    ],
)
def test_fields_that_contradict_each_other(fields, text):
    with pytest.raises(ValueError, match=text):
        SamplingParams(**fields)


def test_unknown_fields_are_named():
    with pytest.raises(TypeError, match="thinking_budget"):
        SamplingParams(thinking_budget=3)


def test_structured_outputs_take_exactly_one_language():
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="got regex, choice"):
        StructuredOutputsParams(regex="a", choice=["b"])
