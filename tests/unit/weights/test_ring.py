"""The staging ring on the CPU."""

import threading
import time

import pytest
import torch

from plimsoll.weights.ring import StagingRing


def test_buffers_are_made_one_by_one_and_used_again() -> None:
    ring = StagingRing(buffer_bytes=4096, num_buffers=3)
    assert (ring.num_bytes, ring.num_bytes_made) == (3 * 4096, 0)
    with ring.buffer() as first:
        assert first.bytes.shape == (4096,)
        assert first.bytes.dtype == torch.uint8
        address = first.bytes.data_ptr()
    with ring.buffer() as again:
        assert again.bytes.data_ptr() == address
        with ring.buffer() as second:
            assert second.bytes.data_ptr() != address
    assert ring.num_bytes_made == 2 * 4096
    ring.close()
    assert ring.num_bytes_made == 0
    ring.close()


def test_never_more_than_its_buffers_are_lent_and_all_who_wait_get_one() -> None:
    ring = StagingRing(buffer_bytes=4096, num_buffers=3)
    lock = threading.Lock()
    lent: set[int] = set()
    most, wrong = 0, 0

    def use() -> None:
        nonlocal most, wrong
        for _ in range(20):
            with ring.buffer() as buffer:
                with lock:
                    wrong += buffer.bytes.data_ptr() in lent
                    lent.add(buffer.bytes.data_ptr())
                    most = max(most, len(lent))
                time.sleep(0.0002)
                with lock:
                    lent.remove(buffer.bytes.data_ptr())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert (most, wrong) == (3, 0)
    ring.close()


def test_a_buffer_comes_back_when_its_user_fails() -> None:
    ring = StagingRing(buffer_bytes=4096, num_buffers=1)
    with pytest.raises(ValueError, match="inside"), ring.buffer():
        raise ValueError("inside")
    with ring.buffer():
        pass
    ring.close()


def test_a_ring_that_is_closed_lends_nothing() -> None:
    ring = StagingRing(buffer_bytes=4096, num_buffers=1)
    with ring.buffer(), pytest.raises(AssertionError, match="still lent"):
        ring.close()
    ring.close()
    with pytest.raises(AssertionError, match="closed"), ring.buffer():
        pass
