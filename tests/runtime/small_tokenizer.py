"""A byte-level BPE tokenizer trained here on a few lines, with eos, bos and a chat template."""

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the quick brown fox jumps over the lazy dog", "Ünïcödé — 日本語 🙂🙃 naïve", '{"name": "fox", "age": 3}'] * 4
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools | length }} tools]{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)


@lru_cache(maxsize=1)
def small_tokenizer():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<extra>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<extra>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
