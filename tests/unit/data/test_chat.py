import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from plimsoll.data.chat import Messages, Refusal, chat_format, prompt_token_ids, response_token_ids
from plimsoll.errors import RefusedError
from tests.unit.data.words import TURNS, word_tokenizer

HI: Messages = [{"role": "user", "content": "hi"}]


def ids_of(tokenizer: PreTrainedTokenizerBase, *conversations: Messages) -> list[tuple[int, ...] | Refusal]:
    return prompt_token_ids(tokenizer, conversations, chat_format(tokenizer))


@pytest.mark.parametrize("template", ["<s> " + TURNS, TURNS], ids=["template prints BOS", "template prints none"])
def test_a_tokenizer_that_puts_bos_gives_exactly_one(template: str) -> None:
    tokenizer = word_tokenizer(template=template, puts_bos=True)
    assert ids_of(tokenizer, HI) == [(0, 2, 1, 3)]


def test_rendering_first_and_tokenising_then_would_give_two() -> None:
    tokenizer = word_tokenizer(template="<s> " + TURNS, puts_bos=True)
    text = tokenizer.apply_chat_template([dict(m) for m in HI], tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == [0, 0, 2, 1, 3]


def test_a_tokenizer_that_puts_no_bos_gets_none() -> None:
    assert ids_of(word_tokenizer(template=TURNS, puts_bos=False), HI) == [(2, 1, 3)]


@pytest.mark.parametrize(("puts_bos", "expected"), [(True, (0, 1, 6)), (False, (1, 6))])
def test_without_a_template_the_prompt_is_plain_text(puts_bos: bool, expected: tuple[int, ...]) -> None:
    tokenizer = word_tokenizer(template=None, puts_bos=puts_bos)
    assert ids_of(tokenizer, [{"role": "user", "content": "hi you"}]) == [expected]


def test_without_a_template_a_text_that_brings_its_bos_keeps_one() -> None:
    assert ids_of(word_tokenizer(template=None, puts_bos=True), [{"role": "user", "content": "<s> hi"}]) == [(0, 1)]


def test_without_a_template_only_a_single_user_message_is_a_prompt() -> None:
    tokenizer = word_tokenizer(template=None, puts_bos=False)
    two = [{"role": "system", "content": "you"}, *HI]
    first, second, third = ids_of(tokenizer, HI, two, HI)
    assert (first, third) == ((1,), (1,))
    assert isinstance(second, Refusal)
    assert "no chat template" in second.reason


def test_a_system_message_with_empty_content_is_passed_on() -> None:
    default = "{% if messages[0].role != 'system' %}<sys> you {% endif %}" + TURNS
    tokenizer = word_tokenizer(template=default, puts_bos=False)
    assert ids_of(tokenizer, HI, [{"role": "system", "content": ""}, *HI]) == [(7, 6, 2, 1, 3), (7, 2, 1, 3)]


def test_a_template_without_a_generation_prompt_is_said_once() -> None:
    without = TURNS.split("{% if add_generation_prompt %}")[0]
    tokenizer = word_tokenizer(template=without, puts_bos=False)
    assert any("no generation prompt" in note for note in chat_format(tokenizer).notes)
    assert ids_of(tokenizer, HI) == [(2, 1)]
    assert chat_format(word_tokenizer(template=TURNS, puts_bos=False)).notes == ()


def test_a_template_that_prints_the_date_is_noticed() -> None:
    clock = "{% if strftime_now is defined %}{{ strftime_now('%Y') + ' ' }}{% endif %}" + TURNS
    assert chat_format(word_tokenizer(template=clock, puts_bos=False)).reads_clock
    assert not chat_format(word_tokenizer(template=TURNS, puts_bos=False)).reads_clock


def test_what_the_template_refuses_is_refused_alone(tiny: PreTrainedTokenizerBase) -> None:
    tool = [*HI, {"role": "tool", "content": "4"}]
    first, second, third = ids_of(tiny, HI, tool, HI)
    assert first == third == ids_of(tiny, HI)[0]
    assert isinstance(second, Refusal)
    assert "this chat template has no role 'tool'" in second.reason


def test_a_template_that_fails_on_every_message_is_refused_before_any_row() -> None:
    broken = word_tokenizer(template="{{ raise_exception('never') }}", puts_bos=False)
    with pytest.raises(RefusedError, match=r"never.*model\.tokenizer"):
        chat_format(broken)


def test_batch_and_single_give_the_same_ids(tiny: PreTrainedTokenizerBase) -> None:
    conversations: list[Messages] = [[{"role": "user", "content": "x" * n + " é\n"}] for n in (1, 7, 300, 2)]
    conversations.append([{"role": "system", "content": "s"}, *HI, {"role": "assistant", "content": "b"}, *HI])
    assert ids_of(tiny, *conversations) == [ids_of(tiny, conversation)[0] for conversation in conversations]
    assert ids_of(tiny) == []


def test_a_response_is_its_text_and_the_end_token_without_bos() -> None:
    tokenizer = word_tokenizer(template="<s> " + TURNS, puts_bos=True)
    assert response_token_ids(tokenizer, ["hi you", "", "you"]) == [(1, 6, 4), (4,), (6, 4)]
    assert response_token_ids(tokenizer, []) == []


def test_prompt_and_response_are_never_tokenised_together() -> None:
    merging = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="</s>")
    prompt = ids_of(tokenizer, [{"role": "user", "content": "a"}])[0]
    assert tokenizer("ab")["input_ids"] == [2]
    assert (prompt, response_token_ids(tokenizer, ["b"])[0]) == ((0,), (1, 3))


def test_a_tokenizer_without_an_end_token_cannot_supervise() -> None:
    tokenizer = word_tokenizer(template=None, puts_bos=False)
    tokenizer.eos_token = None
    with pytest.raises(RefusedError, match="end-of-sequence"):
        response_token_ids(tokenizer, ["hi"])
