"""When choices of requests began, in the columns of engine.proto."""

from collections.abc import Sequence

from protos import engine_pb2
from runtime.arrays import INT32, UINT64, pack, unpack
from runtime.request import Start

US_PER_S = 1_000_000


def encode_starts(starts: Sequence[Start | None]) -> engine_pb2.Starts | None:
    """None where there are none, as in most steps."""
    found = [(row, start) for row, start in enumerate(starts) if start is not None]
    if not found:
        return None
    return engine_pb2.Starts(
        rows=pack(INT32, [row for row, _ in found]),
        queue_us=pack(UINT64, [round(start.queue_s * US_PER_S) for _, start in found]),
        prefill_us=pack(UINT64, [round(start.prefill_s * US_PER_S) for _, start in found]),
    )


def decode_starts(message: engine_pb2.Starts, num_rows: int) -> list[tuple[int, Start]]:
    """Starts with the rows that they are of, in [0, `num_rows`).

    Raises ValueError: the arrays don't fit together, or there is no such row.
    """
    rows = unpack(INT32, "starts.rows", message.rows)
    queue_us = unpack(UINT64, "starts.queue_us", message.queue_us)
    prefill_us = unpack(UINT64, "starts.prefill_us", message.prefill_us)
    if not len(rows) == len(queue_us) == len(prefill_us):
        raise ValueError(
            f"starts has {len(rows)} rows, {len(queue_us)} queue_us, {len(prefill_us)} "
            "prefill_us: must be equal"
        )
    for row in rows:
        if not 0 <= row < num_rows:
            raise ValueError(f"starts.rows has {row}: must be in [0, {num_rows})")
    return [
        (row, Start(queue / US_PER_S, prefill / US_PER_S))
        for row, queue, prefill in zip(rows, queue_us, prefill_us, strict=True)
    ]
