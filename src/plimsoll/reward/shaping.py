"""Length shaping of rewards."""


def overlong_penalty(response_length: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """What is added to the score of a response of `response_length` tokens: a number in [-penalty, 0].

    Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), times `penalty`: 0 up to max_tokens - buffer, then
    linearly down, -penalty from max_tokens on. `buffer` 0 is off.
    """
    assert 0 <= buffer <= max_tokens
    excess = response_length - (max_tokens - buffer)
    if buffer == 0 or excess <= 0:
        return 0.0
    return -penalty * min(excess / buffer, 1.0)
