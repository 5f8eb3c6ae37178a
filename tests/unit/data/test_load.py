import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from plimsoll.config.data import DataConfig
from plimsoll.data.dataset import Dataset
from plimsoll.data.load import load_dataset
from plimsoll.errors import DataError
from tests.unit.data.words import TURNS, word_tokenizer

USER = [{"role": "user", "content": "hi"}]
GOOD = {"prompt": "1+1=", "answer": "2"}


def write(path: Path, *rows: Any) -> str:
    """A .jsonl file; a row that is bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def load(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "eval"] = "train",
    need: Literal["answer", "response"] = "answer",
    **settings: Any,
) -> Dataset:
    config = DataConfig.model_validate({"train": source, "eval": source, "prompts_per_step": 1, **settings})
    return load_dataset(source, config, tokenizer, split=split, seed=0, need=need)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


SIX_ROWS = (
    GOOD,
    {"answer": "2"},
    {"prompt": 5, "answer": "2"},
    {"prompt": [], "answer": "2"},
    {"prompt": [{"content": "hi"}], "answer": "2"},
    {"prompt": "1+1=", "answer": None},
)


def test_malformed_rows_are_one_error_that_lists_all_of_them(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError) as caught:
        load(write(file, *SIX_ROWS), tiny)
    heading, *lines = caught.value.causes
    assert "data.bad_rows=drop" in heading
    assert lines == [
        "row 1 (line 2): no prompt",
        "row 2 (line 3): prompt is neither text nor a list of messages (it is the int 5)",
        "row 3 (line 4): prompt is an empty list",
        "row 4 (line 5): message without role (prompt[0])",
        "row 5 (line 6): answer is null",
    ]


def test_malformed_rows_can_be_dropped_and_are_counted_by_reason(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    source = write(file, *SIX_ROWS)
    dataset = load(source, tiny, bad_rows="drop", max_bad_share=0.9)
    assert [prompt.row for prompt in dataset.prompts] == [0]
    assert dataset.report.num_read == 6
    assert dataset.report.dropped == {
        "no prompt": 1,
        "prompt is neither text nor a list of messages": 1,
        "prompt is an empty list": 1,
        "message without role": 1,
        "answer is null": 1,
    }
    with pytest.raises(DataError, match=r"5 of 6 rows are malformed, more than data\.max_bad_share=0\.8"):
        load(source, tiny, bad_rows="drop", max_bad_share=0.8)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"prompt": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (["1+1="], "not a JSON object (a list)"),
        ({"prompt": "", "answer": 2}, "prompt is empty"),
        ({"prompt": None, "answer": 2}, "prompt is null"),
        ({"prompt": "1"}, "no answer"),
        (b'{"prompt": "1", "answer": NaN}', "answer is null"),
        ({"prompt": ["hi"], "answer": 2}, "message is not an object (prompt[0] is of type str)"),
        ({"prompt": [{"role": "user"}], "answer": 2}, "message without content (prompt[0])"),
        ({"prompt": [{"role": "bot", "content": "x"}], "answer": 2}, "prompt[0].role is 'bot', not one of"),
        ({"prompt": [{"role": "user", "content": 3}], "answer": 2}, "prompt[0].content is the int 3"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 2},
            "prompt[0].content[0] is 'image'",
        ),
        ({"prompt": [{**USER[0], "tool_calls": [1]}], "answer": 2}, "prompt[0].tool_calls is of type list"),
        ({"prompt": [*USER, {"role": "assistant", "content": "x"}], "answer": 2}, "ends with an assistant message"),
        ({"prompt": [*USER, {"role": "tool", "content": "x"}], "answer": 2}, "template refuses it"),
    ],
)
def test_each_kind_of_bad_row_says_what_is_wrong(
    file: Path, tiny: PreTrainedTokenizerBase, row: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(write(file, GOOD, row, GOOD), tiny)
    [_, line] = caught.value.causes
    assert line.startswith("row 1 (line 2): ")
    assert reason in line


def test_a_list_of_text_parts_is_joined(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    joined, plain = load(write(file, {"prompt": [{"role": "user", "content": parts}], "answer": 2}, GOOD), tiny).prompts
    assert joined.token_ids == plain.token_ids
    assert (joined.plain, plain.plain) == (False, True)


def test_blank_lines_are_no_rows(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"row 1 \(line 4\): no answer"):
        load(write(file, b"", GOOD, b"  ", {"prompt": "1"}), tiny)


# Unicode


def unicode_rows(path: Path) -> str:
    return write(
        path,
        b'\xef\xbb\xbf{"prompt": "bom", "answer": 1}',
        rb'{"prompt": "lone \ud83d", "answer": 1, "note": {"deep": ["\udc00"]}}',
        rb'{"prompt": "nul \u0000", "answer": 1}',
        rb'{"prompt": "pair \ud83d\ude00", "answer": 1}',
        {"prompt": "x" * 1_000_000, "answer": 1},
        '{"prompt": "emoji 😀 \ufeff", "answer": 1}'.encode(),
    )


def test_a_lone_surrogate_is_replaced_and_all_other_text_is_kept(file: Path) -> None:
    dataset = load(unicode_rows(file), word_tokenizer(template=TURNS, puts_bos=False))
    texts = [prompt.text for prompt in dataset.prompts]
    assert texts == ["bom", "lone \ufffd", "nul \0", "pair 😀", "x" * 1_000_000, "emoji 😀 \ufeff"]
    assert dataset.prompts[1].extra == {"note": {"deep": ["\ufffd"]}}
    assert dataset.report.replaced_rows == (1,)
    assert any("U+FFFD in 1 row (1)" in line for line in dataset.report.lines())
    for prompt in dataset.prompts:
        repr(prompt).encode()  # a log or a checkpoint can be written


def test_rows_with_invalid_text_can_be_dropped_or_refused(file: Path) -> None:
    tokenizer, source = word_tokenizer(template=TURNS, puts_bos=False), unicode_rows(file)
    dataset = load(source, tokenizer, bad_text="drop")
    assert [prompt.row for prompt in dataset.prompts] == [0, 2, 3, 4, 5]
    assert dataset.report.dropped == {"text is not valid Unicode": 1}
    with pytest.raises(DataError) as caught:
        load(source, tokenizer, bad_text="error")
    assert "data.bad_text=replace" in caught.value.causes[0]
    assert caught.value.causes[1:] == ("row 1 (line 2): text is not valid Unicode",)


@pytest.mark.parametrize("text", ["nul \0", "emoji 😀 \ufeff", "lone \ufffd"])
def test_unusual_text_goes_through_the_tokenizer_unchanged(
    file: Path, tiny: PreTrainedTokenizerBase, text: str
) -> None:
    [prompt] = load(write(file, {"prompt": text, "answer": 1}), tiny).prompts
    assert tiny.decode(prompt.token_ids) == f"<|user|>{text}<|assistant|>"


def test_bytes_that_are_not_utf8_are_invalid_text(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    dataset = load(write(file, b'{"prompt": "caf\xe9", "answer": "\xff"}'), tiny)
    assert (dataset.prompts[0].text, dataset.prompts[0].answer) == ("caf\ufffd", "\ufffd")
    assert dataset.report.replaced_rows == (0,)


# Length


TWELVE = {"prompt": [{"role": "user", "content": "hi you hi you hi you hi you hi you"}], "answer": 1}


def test_an_overlong_prompt_is_dropped_and_counted(file: Path) -> None:
    tokenizer = word_tokenizer(template=TURNS, puts_bos=False)
    dataset = load(write(file, {"prompt": USER, "answer": 1}, TWELVE), tokenizer, max_prompt_tokens=8)
    assert [prompt.row for prompt in dataset.prompts] == [0]
    assert dataset.report.dropped == {"longer than data.max_prompt_tokens=8": 1}


def test_an_overlong_prompt_is_cut_to_its_last_tokens(file: Path) -> None:
    tokenizer = word_tokenizer(template=TURNS, puts_bos=False)
    source = write(file, TWELVE)
    [whole] = load(source, tokenizer).prompts
    dataset = load(source, tokenizer, max_prompt_tokens=8, overlong="truncate_left")
    assert len(whole.token_ids) == 12
    assert dataset.prompts[0].token_ids == whole.token_ids[-8:] == (6, 1, 6, 1, 6, 1, 6, 3)
    assert dataset.report.truncated_rows == (0,)
    assert dataset.report.longest_prompt == 8


def test_an_overlong_prompt_is_refused_with_its_row_number(file: Path) -> None:
    tokenizer = word_tokenizer(template=TURNS, puts_bos=False)
    source = write(file, {"prompt": USER, "answer": 1}, TWELVE)
    with pytest.raises(DataError) as caught:
        load(source, tokenizer, max_prompt_tokens=8, overlong="error")
    assert caught.value.causes[1] == "row 1 (line 2): 12 tokens, more than data.max_prompt_tokens=8"
    assert len(load(source, tokenizer, max_prompt_tokens=12, overlong="error").prompts) == 2


# Too few rows


def test_three_rows_do_not_fill_a_batch_of_four(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    source = write(file, GOOD, GOOD, GOOD)
    with pytest.raises(DataError, match=r"3 usable rows.*data\.prompts_per_step=4.*data\.drop_last=false"):
        load(source, tiny, prompts_per_step=4)
    assert len(load(source, tiny, prompts_per_step=4, drop_last=False).prompts) == 3
    assert len(load(source, tiny, prompts_per_step=4, split="eval").prompts) == 3


def test_no_rows_are_refused(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"0 rows read.*set data\.eval"):
        load(write(file), tiny, split="eval")


def test_when_all_rows_are_dropped_the_counts_and_the_key_are_said(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError) as caught:
        load(write(file, *[GOOD] * 5), tiny, max_prompt_tokens=2)
    message = str(caught.value)
    assert "5 rows read, 5 dropped (5 longer than data.max_prompt_tokens=2)" in message
    assert "raise data.max_prompt_tokens" in message


def test_evaluation_reads_the_first_rows(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    source = write(file, *({"prompt": str(n), "answer": n} for n in range(5)))
    assert [p.answer for p in load(source, tiny, split="eval", max_eval_rows=2).prompts] == [0, 1]
    assert len(load(source, tiny, split="train", max_eval_rows=2).prompts) == 5


# Schemas

VERL: list[Mapping[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n}+1=", "name": name}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n, name in enumerate([None, "ann", None])
]


def test_verl_parquet_is_read_as_it_is(tmp_path: Path, tiny: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(VERL), path)
    prompts = load(str(path), tiny).prompts
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]
    assert [prompt.data_source for prompt in prompts] == ["openai/gsm8k"] * 3
    assert prompts[1].extra == {"ability": "math", "extra_info": {"index": 1, "split": "train"}}
    assert prompts[0].messages == ({"role": "user", "content": "0+1="},)  # the null of another message's field is gone
    assert prompts[1].messages == ({"role": "user", "content": "1+1=", "name": "ann"},)


def test_verl_rows_may_be_jsonl_and_ours_may_be_parquet(
    tmp_path: Path, file: Path, tiny: PreTrainedTokenizerBase
) -> None:
    assert [prompt.answer for prompt in load(write(file, *VERL), tiny).prompts] == ["1", "2", "3"]
    ours = tmp_path / "ours.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "2+2="], "answer": [2, 4], "level": ["a", "b"]}), ours)
    assert [(p.answer, p.extra) for p in load(str(ours), tiny).prompts] == [(2, {"level": "a"}), (4, {"level": "b"})]


def test_parquet_text_that_is_not_utf8_is_a_malformed_row(tmp_path: Path, tiny: PreTrainedTokenizerBase) -> None:
    bad = pa.array([b"ok", b"\xff"], type=pa.binary()).view(pa.string())
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"prompt": bad, "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match="row 1: text is not UTF-8"):
        load(str(path), tiny)


def test_other_column_names(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    source = write(file, {"question": "1+1=", "gold": "2", "prompt": "unused", "level": 3})
    dataset = load(source, tiny, prompt_key="question", answer_key="gold")
    [prompt] = dataset.prompts
    assert (prompt.text, prompt.answer, prompt.extra) == ("1+1=", "2", {"level": 3})
    assert any("column 'prompt' is not handed to the reward function" in note for note in dataset.report.notes)
    with pytest.raises(DataError, match="no question"):
        load(write(file, GOOD), tiny, prompt_key="question")


def test_supervised_rows_take_the_response_or_else_the_answer(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    rows = ({"prompt": "1", "response": "one", "answer": "x"}, {"prompt": "2", "answer": 2}, {"prompt": "3"})
    with pytest.raises(DataError, match=r"row 2 \(line 3\): neither response nor answer"):
        load(write(file, *rows), tiny, need="response")
    prompts = load(write(file, *rows[:2]), tiny, need="response").prompts
    assert [prompt.response for prompt in prompts] == ["one", "2"]
    assert load(write(file, *rows[:2]), tiny).prompts[0].response is None


def test_a_system_prompt_is_put_before_prompts_that_have_none(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    own = {"prompt": [{"role": "system", "content": "own"}, *USER], "answer": 1}
    source = write(file, {"prompt": USER, "answer": 1}, own)
    first, second = (tiny.decode(p.token_ids) for p in load(source, tiny, system_prompt="be").prompts)
    assert first == "<|system|>be<|user|>hi<|assistant|>"
    assert second == "<|system|>own<|user|>hi<|assistant|>"
    with pytest.raises(DataError, match=r"data\.system_prompt is set, but the tokenizer has no chat template"):
        load(source, word_tokenizer(template=None, puts_bos=False), system_prompt="be")


@pytest.mark.parametrize("name", ["none.jsonl", "rows.csv", "broken.parquet"])
def test_a_file_that_cannot_be_read_names_the_key(tmp_path: Path, tiny: PreTrainedTokenizerBase, name: str) -> None:
    for existing in ("rows.csv", "broken.parquet"):
        (tmp_path / existing).write_text("no rows")
    with pytest.raises(DataError, match=rf"data\.eval=.*{name}"):
        load(str(tmp_path / name), tiny, split="eval")


def test_the_fingerprint_follows_rows_ids_and_answers(file: Path, tiny: PreTrainedTokenizerBase) -> None:
    other_file = file.with_name("copy.jsonl")
    base = load(write(file, GOOD, GOOD), tiny).fingerprint
    assert load(write(other_file, GOOD, GOOD), tiny).fingerprint == base
    assert load(write(file, GOOD), tiny).fingerprint != base
    assert load(write(file, GOOD, {**GOOD, "answer": "3"}), tiny).fingerprint != base
    assert load(write(file, GOOD, GOOD), tiny, system_prompt="be").fingerprint != base


def test_a_dated_template_leaves_the_fingerprint_alone(file: Path) -> None:
    source = write(file, {"prompt": USER, "answer": 1})

    def dated(day: str) -> Dataset:
        template = "{% if strftime_now is defined %}" + day + " {% endif %}" + TURNS
        return load(source, word_tokenizer(template=template, puts_bos=False))

    assert dated("hi").prompts != dated("you").prompts
    assert dated("hi").fingerprint == dated("you").fingerprint


def test_a_task_is_a_source(tiny: PreTrainedTokenizerBase) -> None:
    settings: dict[str, Any] = {"task": {"train_size": 40, "eval_size": 20}}
    train = load("task:reverse_string", tiny, **settings)
    held_out = load("task:reverse_string", tiny, split="eval", **settings)
    assert (len(train.prompts), len(held_out.prompts)) == (40, 20)
    assert not {p.text for p in train.prompts} & {p.text for p in held_out.prompts}
    assert {p.data_source for p in train.prompts} == {"task:reverse_string"}
    assert max(len(p.token_ids) for p in train.prompts) == 9
    [response] = {p.response for p in load("task:copy_string", tiny, need="response", task={"train_size": 1}).prompts}
    assert response is not None
    assert len(response) == 6
