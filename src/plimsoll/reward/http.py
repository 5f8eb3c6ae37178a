"""The rule `http`: a server of the user's scores."""

import json
import math
import os
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, cast

import httpx

from plimsoll.config.base import Options
from plimsoll.errors import RecipeError

_SHOWN_CHARACTERS = 500
_MAX_BACKOFF = 30.0  # seconds
_TOO_MANY_REQUESTS = 429
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class EndpointError(RuntimeError):
    """The server gave no score; the text has its address and the reason."""


def http(
    prompt: str,
    response: str,
    answer: object,
    *,
    url: str,
    timeout: float = 5.0,
    retries: int = 3,
    backoff: float = 0.5,
    headers: Mapping[str, str] | None = None,
    token_env: str | None = None,
    score_key: str = "score",
    data_source: str = "",
    **extra: Any,
) -> Mapping[str, Any] | float | None:
    """The score that a POST to `url` is answered with.

    Sent as JSON: `prompt`, `response`, `answer`, `data_source`, and `extra`, the row's other columns. The reply is a
    number or null (not scored), or an object with that under `score_key`; its other numbers are parts of the score.
    Failed connections, time-outs (`timeout` seconds without a byte, for each try), 429 and 5xx are tried again, at most
    `retries` times: after the seconds that Retry-After asks for, else after `backoff` seconds, doubled every time, less
    up to half of it by chance. `token_env`: name of a variable of the environment, sent as a bearer token.
    The environment's proxies (HTTPS_PROXY, NO_PROXY) are used, but not for this machine itself.
    Raises EndpointError when there is no score; `reward.timeout` bounds all tries together.
    """
    body = json.dumps(
        {"prompt": prompt, "response": response, "answer": answer, "data_source": data_source, "extra": extra},
        default=str,  # dates and decimals of a parquet file
    )
    sent = {"Content-Type": "application/json", **(headers or {})}
    if token_env is not None:
        sent["Authorization"] = f"Bearer {os.environ[token_env]}"
    for attempt in range(retries + 1):
        reply: httpx.Response | None = None
        reason = ""
        try:
            reply = _client().post(url, content=body, headers=sent, timeout=timeout)
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
        if reply is not None:
            if reply.is_success:
                return _score(url, reply, score_key)
            reason = f"status {reply.status_code}: {reply.text[:_SHOWN_CHARACTERS]}"
            if reply.status_code != _TOO_MANY_REQUESTS and not reply.is_server_error:
                raise EndpointError(f"{_shown(url)} answered with {reason}")
        if attempt == retries:
            raise EndpointError(f"{_shown(url)} gave no score in {retries + 1} tries; the last: {reason}")
        time.sleep(_pause(reply, backoff * 2**attempt))
    raise AssertionError("the last try returns or raises")


def check_options(options: Options) -> None:
    """Raises RecipeError for a url that is none, numbers out of range, and a token that is not in the environment."""
    causes: list[str] = []
    url = options.get("url")
    if not isinstance(url, str) or not _is_http(url):
        causes.append(f"reward.options.url: {url!r} should be the address of a server, http://… or https://….")
    for name, default, least in (("timeout", 5.0, 1e-3), ("retries", 3, 0), ("backoff", 0.5, 0)):
        value = options.get(name, default)
        kinds = (int,) if name == "retries" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
            causes.append(f"reward.options.{name}: {value!r} should be a number from {least:g}.")
    headers = options.get("headers") or {}
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        causes.append("reward.options.headers: should be a mapping of names to texts.")
    token_env = options.get("token_env")
    if token_env is not None and (not isinstance(token_env, str) or not os.environ.get(token_env)):
        causes.append(f"reward.options.token_env: there is no variable {token_env!r} in the environment; export it.")
    if causes:
        raise RecipeError(causes)


@lru_cache(maxsize=1)
def _client() -> httpx.Client:
    """One a process, so that connections are kept."""
    # A proxy cannot reach a server on this machine, and few set NO_PROXY for it.
    return httpx.Client(mounts={f"all://{host}": None for host in _LOOPBACK})


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def _score(url: str, reply: httpx.Response, key: str) -> Mapping[str, Any] | float | None:
    try:
        value: Any = reply.json()
    except ValueError as error:
        raise EndpointError(f"{_shown(url)} answered with no JSON: {reply.text[:_SHOWN_CHARACTERS]}") from error
    if not isinstance(value, dict):
        return _number(url, reply, value)
    entries = cast("dict[str, Any]", value)
    if key not in entries:
        raise EndpointError(f"{_shown(url)} answered without {key!r}: {reply.text[:_SHOWN_CHARACTERS]}")
    return {name: part for name, part in entries.items() if name != key} | {"score": _number(url, reply, entries[key])}


def _number(url: str, reply: httpx.Response, value: object) -> float | None:
    if value is None or (isinstance(value, bool | int | float) and math.isfinite(value)):
        return None if value is None else float(value)
    raise EndpointError(f"{_shown(url)} answered with a score that is no number: {reply.text[:_SHOWN_CHARACTERS]}")


def _pause(reply: httpx.Response | None, backoff: float) -> float:
    """Seconds before the next try."""
    asked = reply.headers.get("Retry-After") if reply is not None else None
    if asked is not None:
        try:
            return max(0.0, float(asked) if asked.strip().isdigit() else _until(asked))
        except ValueError:
            pass  # neither seconds nor a date: as if it were not there
    return min(_MAX_BACKOFF, backoff) * random.uniform(0.5, 1.0)


def _until(date: str) -> float:
    moment = parsedate_to_datetime(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()


def _shown(url: str) -> str:
    """Without a password that it may hold."""
    return str(httpx.URL(url).copy_with(username=None, password=None))
