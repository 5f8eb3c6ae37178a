"""Writes recipes/models/tiny: a character tokenizer with its chat template, and the config.json of a small Qwen2.

    python tools/make_tiny_tokenizer.py [FOLDER]

Byte-level BPE without a single merge: one token a character for ASCII, one token a UTF-8 byte for everything else, so
decode(encode(text)) == text and no text is unknown. (Text is first brought to NFC, Unicode's composed form.) No BOS.

The pipeline is exactly that of transformers' Qwen2Tokenizer, and has to be: for a folder whose config.json says
`qwen2`, AutoTokenizer takes that class whatever tokenizer_config.json asks for, and replaces any other pre-tokenizer,
normalizer and decoder of tokenizer.json without a word (seen in transformers 5.24).

A turn begins with its role's token. Only the assistant's turn is closed, by `<|end|>`, which is the end-of-sequence
token: the prompt of one user message costs two tokens more than its text.
"""

import sys
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2Tokenizer

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception(\"this chat template has no role '\" + message['role'] + \"'\") -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tokenizer() -> Qwen2Tokenizer:
    """The tokenizer: 5 special tokens and 256 bytes."""
    tokens = (PAD, END, *ROLES, *sorted(ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def config(vocabulary: Qwen2Tokenizer) -> Qwen2Config:
    """About 0.8 million parameters, embedding and head tied."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary.eos_token_id,
        pad_token_id=vocabulary.pad_token_id,
        dtype="float32",
    )


def main(folder: Path) -> None:
    """Write the files; the same bytes each time."""
    made = tokenizer()
    made.save_pretrained(folder)
    config(made).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "recipes" / "models" / "tiny")
