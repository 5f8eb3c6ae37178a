"""Word tokenizers made by hand, so that every id in a test can be read off."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

VOCABULARY = {"<s>": 0, "hi": 1, "<u>": 2, "<a>": 3, "</s>": 4, "<unk>": 5, "you": 6, "<sys>": 7}

TURNS = (
    "{% for m in messages %}"
    "{{ {'user': '<u> ', 'assistant': '<a> ', 'system': '<sys> '}[m.role] + m.content + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def word_tokenizer(*, template: str | None, puts_bos: bool) -> PreTrainedTokenizerFast:
    """Splits at white space; `puts_bos` puts <s> (0) before plain text, as Llama's tokenizers do."""
    model = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    if puts_bos:
        model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<u>", "<a>", "<sys>"],
    )
    tokenizer.chat_template = template
    return tokenizer
