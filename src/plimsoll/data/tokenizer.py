"""Reading a tokenizer from a folder, never from the network."""

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from plimsoll.errors import RefusedError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""One of these must be there. AutoTokenizer does not check: for a folder with only a config.json it builds a tokenizer
with an empty vocabulary (transformers 5.24), and every prompt would become no tokens at all."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder.

    Raises RefusedError when the folder is missing, holds no vocabulary, or holds one that transformers cannot read.
    """
    advice = "set model.tokenizer to a folder that holds one"
    if not folder.is_dir():
        raise RefusedError(f"tokenizer: {folder} is not a folder; {advice}")
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise RefusedError(f"tokenizer: {folder} holds none of {', '.join(VOCABULARY_FILES)}; {advice}")
    try:
        tokenizer = cast(
            object, AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # the Rust library raises plain Exception on a damaged file
        raise RefusedError(f"tokenizer: {folder} cannot be read ({type(error).__name__}: {error}); {advice}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer)
    return tokenizer
