"""The rule `json_schema`: the response is JSON, and valid against a schema (library jsonschema)."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing import Registry, Resource, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError

_BLOCK = re.compile(r"```json[ \t]*\n(.*?)```", re.IGNORECASE | re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


def json_schema(
    prompt: str,
    response: str,
    answer: object,
    *,
    schema: dict[str, Any] | None = None,
    match_answer: bool = False,
    extract: bool = True,
    right: float = 1.0,
    wrong: float = 0.0,
) -> float:
    """`right` where the response is JSON and valid against the schema, else `wrong`.

    The JSON is the whole response; with `extract` also the last ```json block, or without one the last object or array
    in the text that stands in no other. NaN, Infinity and keys that appear twice are not JSON.
    Schema: the option, else the row's answer where that is a mapping (or the JSON text of one) and `match_answer` is
    off; without any, being JSON is enough. Its draft is that of `$schema`, by default 2020-12; nothing is fetched for
    `$ref`; `format` is not checked. `match_answer`: the value must also equal the row's answer (1 = 1.0, but not true);
    an answer that is JSON text counts as the value it stands for.
    Raises ValueError for a schema in the row that is none.
    """
    validator = _validator(json.dumps(schema)) if schema is not None else None
    if schema is None and not match_answer:
        validator = _of_answer(answer)
    try:
        value = _read(response, extract)
    except ValueError:
        return wrong
    if validator is not None and not validator.is_valid(value):
        return wrong
    if match_answer and not _equal(value, _answer_value(answer)):
        return wrong
    return right


def check_options(options: Options) -> None:
    """Raises RecipeError for a schema that is none, of an unknown draft, or with references that lead nowhere."""
    schema = options.get("schema")
    if schema is None:
        return
    try:
        _validator(json.dumps(schema))
    except ValueError as error:
        raise RecipeError(f"reward.options.schema: {error}.") from error


def _of_answer(answer: object) -> Validator | None:
    value = _answer_value(answer)
    if not isinstance(value, Mapping):
        return None
    validator = _validator(json.dumps(value))
    keys = cast("Mapping[str, Any]", value).keys()
    if keys and not keys & {*Draft202012Validator.VALIDATORS, "$schema", "definitions"}:
        # Every value is valid against it: JSON Schema ignores keys that it does not know.
        raise ValueError(
            f"this row's answer has no key of JSON Schema (it has {', '.join(keys)}); "
            "to compare with the answer itself set reward.options.match_answer: true"
        )
    return validator


def _answer_value(answer: object) -> object:
    if not isinstance(answer, str):
        return answer
    try:
        return _parse(answer)
    except ValueError:
        return answer


@lru_cache(maxsize=256)
def _validator(text: str) -> Validator:
    """For a schema as JSON text. Raises ValueError."""
    schema: Any = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is a mapping; this is {text[:60]}")
    schema = cast("dict[str, Any]", schema)
    draft = schema.get("$schema", Draft202012Validator.META_SCHEMA["$schema"])
    opaque: Specification[Any] = Specification.OPAQUE
    known = specification_with(str(draft), default=opaque)
    if known is opaque:
        raise ValueError(f"its $schema {draft!r} is no draft of JSON Schema that is known here")
    validator: Any = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"it is not a JSON schema: at {error.json_path}: {error.message}") from error
    _check_references(known.create_resource(schema))
    # A registry of our own: the default one fetches what `$ref` names.
    return validator(schema, registry=REGISTRY)


def _check_references(root: Resource[Any]) -> None:
    registry: Registry[Any] = REGISTRY
    pending = [(root, registry.resolver_with_root(root))]
    while pending:
        resource, resolver = pending.pop()
        if isinstance(resource.contents, Mapping) and "$ref" in resource.contents:
            reference = str(cast("Mapping[str, Any]", resource.contents)["$ref"])
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ValueError(
                    f"its $ref {reference!r} is not in the schema, and references are not fetched: put it under $defs"
                ) from error
        pending += [(sub, resolver.in_subresource(sub)) for sub in resource.subresources()]


def _read(response: str, extract: bool) -> Any:
    """The JSON value of a response. Raises ValueError where there is none."""
    try:
        return _parse(response)
    except ValueError:
        if not extract:
            raise
    blocks = _BLOCK.findall(response)
    if blocks:
        return _parse(blocks[-1])
    *_, last = (None, *_top_level(response))
    if last is None:
        raise ValueError("no object or array in the text")
    return last


def _top_level(text: str) -> Iterator[object]:
    """The objects and arrays of a text that stand in no other brackets, in order."""
    closings = _closings(text)
    index = 0
    while (start := _next_opening(text, index)) is not None:
        try:
            value, index = _DECODER.raw_decode(text, start)
        except RecursionError as error:
            raise ValueError("deeper than Python's reader goes") from error
        except ValueError:
            # Of `{"a": {"b": 1},}`, which is not JSON, the part in it is no answer either.
            index = closings.get(start, start) + 1
        else:
            yield value


def _next_opening(text: str, index: int) -> int | None:
    found = [place for place in (text.find("{", index), text.find("[", index)) if place >= 0]
    return min(found, default=None)


def _closings(text: str) -> dict[int, int]:
    """Opening bracket → its closing one, by position, with brackets in quotes left aside."""
    opened: list[int] = []
    closings: dict[int, int] = {}
    index = 0
    while token := _TOKEN.search(text, index):
        index = token.end()
        if token[0][0] == '"':
            if not opened:
                index = token.start() + 1  # prose: a quote in it may have no partner
        elif token[0] in _CLOSING:
            opened.append(token.start())
        elif opened and token[0] == _CLOSING[text[opened[-1]]]:
            closings[opened.pop()] = token.start()
    return closings


def _parse(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("deeper than Python's reader goes") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _equal(left: object, right: object) -> bool:
    """Equality of JSON values: 1 is 1.0, but true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        ours, theirs = cast("Mapping[str, object]", left), cast("Mapping[str, object]", right)
        return ours.keys() == theirs.keys() and all(_equal(value, theirs[key]) for key, value in ours.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        items, others = cast("list[object]", left), cast("list[object]", right)
        return len(items) == len(others) and all(_equal(one, other) for one, other in zip(items, others, strict=True))
    return left == right
