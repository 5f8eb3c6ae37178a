"""A row of the ledger to make others of with `dataclasses.replace`."""

from plimsoll.memory.ledger import LedgerRow

ROW = LedgerRow(
    step=1,
    phase="update",
    rank=0,
    device="fake:0",
    process="trainer",
    pid=1,
    failed=False,
    host_anonymous=None,
    host_anonymous_peak=None,
    host_growth=None,
    host_growth_peak=None,
    host_file=None,
    host_shared=None,
    host_pinned=None,
    host_available=None,
    host_limit=None,
    device_allocated=None,
    device_reserved=None,
    device_allocated_peak=None,
    device_reserved_peak=None,
    device_used=None,
    device_total=None,
    device_non_torch=None,
    device_released=None,
    fragmentation=None,
    unattributed=None,
    residents={},
    on_host=[],
    predicted={},
    allocator="plain",
    seconds=0.5,
)
"""What the system can be silent about is None."""
