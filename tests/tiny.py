"""A tiny random Llama with a byte-level tokenizer and a chat template, in the Hugging Face layout."""

import json
from pathlib import Path

END = "<|end|>"
START = "<|start|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    "{{ tone }}"
)


def make_tiny_llama(folder: Path, *, vocab_padding: int = 0, context: int = 256) -> Path:
    """Write the model to ``folder`` (created) and return it. Same bytes every time: the seed is fixed."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "Ġt", "he", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + vocab_padding,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.4,  # wide enough that greedy choices are far apart
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
