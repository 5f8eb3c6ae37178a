"""Messages → prompt ids. `prompt_token_ids` is the only place where a chat template is applied.

Rules:
- With a chat template, the template is applied and tokenised in one step. Rendering to text first and tokenising that
  text puts a second BOS before the one that the template prints.
- Exactly one BOS, if the tokenizer puts one before plain text: where a template prints none, it is put first.
- Without a template, a single user message is tokenised as plain text; more than one message is refused.
- A system message with empty content is a message like any other: it turns off the default system prompt that some
  templates print when there is no system message.
- What the template itself refuses (a role, an order of roles) is refused with the template's own words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from plimsoll.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError)
"""What a template raises on messages it was not written for: its own refusal, or None where it expects text."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ChatFormat:
    """What a tokenizer does with messages, found by trying once."""

    has_template: bool
    bos: tuple[int, ...]  # (BOS,) when the tokenizer puts one before plain text, else ()
    reads_clock: bool  # the template prints the date: the same messages have other ids tomorrow
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class Refusal:
    """Why one conversation has no ids."""

    reason: str


def chat_format(tokenizer: "PreTrainedTokenizerBase") -> ChatFormat:
    """Try the tokenizer on a short message.

    Raises RefusedError when the tokenizer has several templates and none of them is its default.
    """
    special = cast(list[int], tokenizer("", add_special_tokens=True)["input_ids"])
    bos = tuple(special[:1]) if special and special[0] == tokenizer.bos_token_id else ()
    if tokenizer.chat_template is None:
        note = "the tokenizer has no chat template; prompts are plain text"
        return ChatFormat(has_template=False, bos=bos, reads_clock=False, notes=(note,))
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise RefusedError(f"tokenizer: no default chat template ({error}); set model.tokenizer to another") from error
    probe: list[dict[str, str]] = [{"role": "user", "content": "x"}]
    notes: list[str] = []
    try:
        ids = _template_ids(tokenizer, [probe])[0]
        without = cast(list[int], tokenizer.apply_chat_template(probe, tokenize=True, return_dict=False))
    except TEMPLATE_ERRORS as error:
        raise RefusedError(
            f"tokenizer: its chat template fails on a single user message ({error}); set model.tokenizer to another"
        ) from error
    if ids == without:
        notes.append("the chat template has no generation prompt: a response begins right after the last message")
    if bos and ids[:1] != list(bos):
        notes.append("the chat template prints no BOS; the tokenizer's is put first")
    reads_clock = "strftime_now" in template
    if reads_clock:
        notes.append("the chat template prints today's date: prompts differ from day to day")
    return ChatFormat(has_template=True, bos=bos, reads_clock=reads_clock, notes=tuple(notes))


def prompt_token_ids(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Messages], chat: ChatFormat
) -> list[tuple[int, ...] | Refusal]:
    """Prompt ids of each conversation, ready for a response to begin; in the order given.

    Args:
        tokenizer: of the model that will answer.
        conversations: messages with string `role` and `content`.
        chat: `chat_format(tokenizer)`.
    """
    if not conversations:
        return []
    encoded: list[list[int] | Refusal]
    if not chat.has_template:
        encoded = _plain_ids(tokenizer, conversations)
    else:
        try:
            encoded = [*_template_ids(tokenizer, conversations)]
        except TEMPLATE_ERRORS:  # one conversation spoils its whole batch: find out which
            encoded = [_template_ids_or_refusal(tokenizer, conversation) for conversation in conversations]
    return [_with_bos(ids, chat.bos) for ids in encoded]


def response_token_ids(tokenizer: "PreTrainedTokenizerBase", responses: Sequence[str]) -> list[tuple[int, ...]]:
    """Supervised targets: each text without special tokens of its own, then the end-of-sequence id.

    A training row is `prompt.token_ids + response ids`; the prompt is never tokenised together with the response.

    Raises RefusedError when the tokenizer has no end-of-sequence token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise RefusedError(
            "tokenizer: it has no end-of-sequence token, so a response cannot be ended; set model.tokenizer"
        )
    if not responses:
        return []
    return [(*ids, cast(int, eos)) for ids in _text_ids(tokenizer, responses)]


def _with_bos(ids: list[int] | Refusal, bos: tuple[int, ...]) -> tuple[int, ...] | Refusal:
    if isinstance(ids, Refusal):
        return ids
    if not ids and not bos:
        return Refusal(reason="prompt has no tokens")
    return tuple(ids) if ids[: len(bos)] == list(bos) else (*bos, *ids)


def _template_ids(tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Messages]) -> list[list[int]]:
    encoded = cast(
        Mapping[str, Any],
        tokenizer.apply_chat_template(
            [[dict(message) for message in conversation] for conversation in conversations],
            tokenize=True,
            add_generation_prompt=True,
            padding=False,
            truncation=False,
            return_dict=True,
        ),
    )
    return cast(list[list[int]], encoded["input_ids"])


def _template_ids_or_refusal(tokenizer: "PreTrainedTokenizerBase", conversation: Messages) -> list[int] | Refusal:
    try:
        return _template_ids(tokenizer, [conversation])[0]
    except TEMPLATE_ERRORS as error:
        return Refusal(reason=f"the chat template refuses it: {error}")


def _plain_ids(tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Messages]) -> list[list[int] | Refusal]:
    plain = [len(conversation) == 1 and conversation[0]["role"] == "user" for conversation in conversations]
    texts = [conversation[0]["content"] for conversation, ok in zip(conversations, plain, strict=True) if ok]
    ids = iter(_text_ids(tokenizer, texts) if texts else [])
    refusal = Refusal(reason="the tokenizer has no chat template, so only a single user message can be a prompt")
    return [next(ids) if ok else refusal for ok in plain]


def _text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, padding=False, truncation=False)
    return cast(list[list[int]], encoded["input_ids"])
