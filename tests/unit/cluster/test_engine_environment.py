from plimsoll.cluster.engine_environment import engine_environment


def test_vllm_stays_in_this_process_whatever_the_user_has_set_and_keeps_the_rest_of_it():
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "OTHER": "x"}
    found = engine_environment("vllm", given)
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_LOGGING_LEVEL" not in found
    assert found["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"  # stdout carries results only
    assert given["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_the_native_engine_needs_nothing():
    assert engine_environment("native", {}) == {}
