import json
import runpy
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedTokenizerBase, Qwen2ForCausalLM

from plimsoll.data.chat import chat_format, prompt_token_ids
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.errors import RefusedError
from tests.unit.data.conftest import TINY

ASCII = "".join(map(chr, range(32, 127)))


@pytest.mark.parametrize("text", [ASCII, "\n a  b , . don't !\n\n x ", "", " ", "\t\r\0", "naïve 😀 €"])
def test_the_tiny_tokenizer_is_lossless(tiny: PreTrainedTokenizerBase, text: str) -> None:
    ids = tiny(text)["input_ids"]
    assert tiny.decode(ids) == text
    assert tiny.decode(ids, skip_special_tokens=True) == text
    assert len(ids) == len(text.encode())


def test_the_tiny_template_costs_two_tokens(tiny: PreTrainedTokenizerBase) -> None:
    [ids] = prompt_token_ids(tiny, [[{"role": "user", "content": "483920>"}]], chat_format(tiny))
    assert isinstance(ids, tuple)
    assert tiny.decode(ids) == "<|user|>483920><|assistant|>"
    assert len(ids) == 9


def test_an_assistant_turn_is_closed_by_the_end_token(tiny: PreTrainedTokenizerBase) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    [ids] = prompt_token_ids(tiny, [messages], chat_format(tiny))
    assert tiny.decode(ids) == "<|system|>s<|user|>u<|assistant|>a<|end|><|user|>u<|assistant|>"


def test_config_and_tokenizer_agree(tiny: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.from_pretrained(TINY)
    assert config.vocab_size == len(tiny)
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (
        tiny.pad_token_id,
        tiny.eos_token_id,
        None,
    )
    assert tiny.pad_token_id != tiny.eos_token_id
    assert 700_000 < sum(p.numel() for p in Qwen2ForCausalLM(config).parameters()) < 1_000_000


def test_the_shipped_files_are_what_the_script_makes(tmp_path: Path) -> None:
    script = runpy.run_path(str(TINY.parents[2] / "tools" / "make_tiny_tokenizer.py"))
    script["main"](tmp_path)
    names = sorted(path.name for path in TINY.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        made, shipped = (tmp_path / name).read_text(), (TINY / name).read_text()
        if name == "config.json":  # the library writes its version; its defaults may grow
            made, shipped = ({**json.loads(text), "transformers_version": ""} for text in (made, shipped))
        assert made == shipped, name


def test_a_folder_that_is_missing_or_holds_no_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"not a folder.*model\.tokenizer"):
        load_tokenizer(tmp_path / "none")
    shutil.copy(TINY / "config.json", tmp_path)
    with pytest.raises(RefusedError, match=r"holds none of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RefusedError, match="cannot be read"):
        load_tokenizer(tmp_path)
