"""Between the wire's messages and what a rank runs: a series of StepDeltas to Batches.

A batch is what the whole StepPlan would have given. All is done for all sequences at once: what a
steady step costs hardly depends on how many there are.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protos import worker_pb2
from workers.arrays import INT32, Int32, check_range, read_array
from workers.batch import NO_REFERENCES, Batch, SamplingColumns, TokenReferences
from workers.batch_difference import find_difference
from workers.codec import NOTHING_SHARED, StepLimits, decode_copies, decode_plan
from workers.errors import OutOfOrderError, StepError
from workers.plan_parts import decode_scores, first_seen
from workers.resident_rows import MAX_ROWS, ResidentRows, read_rows
from workers.resident_tables import Rows
from workers.sampling_codec import decode_inputs


class _Layout(NamedTuple):
    """The sequences of a step, S of them, and their tokens."""

    rows: Rows  # [S]
    input_ids: Int32  # [T]
    positions: Int32  # [T]
    seq_lens: Int32  # [S]
    query_lens: Int32  # [S]
    sample_index: Int32  # [R]
    sample_sequence: Int32  # [R]


class DeltaDecoder:
    """Keeps what deltas leave out: rows, who is steady, and what the last step sampled.

    Raises StepError: a delta is malformed, or doesn't fit what is here; the message names the
    array. Then only a keyframe can follow.
    """

    def __init__(self) -> None:
        self._last_step_id: int | None = None
        self._forget(num_groups=0)

    def decode(
        self,
        request: worker_pb2.StepRequest,
        limits: StepLimits,
        shared: Mapping[int, int] = NOTHING_SHARED,
    ) -> Batch:
        """The step of a request with a delta, as `decode_plan`, and compared with it if asked for.

        Raises OutOfOrderError: it isn't a delta to the last step that came here.
        """
        delta = request.delta
        last, self._last_step_id = self._last_step_id, None
        if delta.is_keyframe:
            self._forget(num_groups=len(limits.windows))
        elif last != request.step_id - 1:
            raise OutOfOrderError(
                f"step {request.step_id} came as a delta to the one before, "
                + ("none of which is known" if last is None else f"step {last} is the last known")
            )
        self._sample_of[self._rows.change(delta, limits)] = -1
        self._change_steady(delta)
        layout = self._lay_out(delta, limits)
        references = self._refer(request, shared)
        self._note_samples(layout)
        batch = self._batch(request, layout, references, limits)
        if request.HasField("checked_plan"):
            _compare(batch, request, limits, shared)
        self._last_step_id = request.step_id
        return batch

    def _forget(self, num_groups: int) -> None:
        self._rows = ResidentRows(num_groups)
        self._steady: Rows = np.zeros(0, np.intp)
        self._steady_lens = np.zeros(0, np.int32)
        self._sample_of = np.full(MAX_ROWS, -1, np.int32)  # by row: its sample of the last step
        self._sampled: Rows = np.zeros(0, np.intp)  # the rows that have one
        # Of the last step: rows, and what they have had since they were added.
        self._read: tuple[Rows, tuple[int, ...], SamplingColumns] | None = None

    def _change_steady(self, delta: worker_pb2.StepDelta) -> None:
        lens = self._steady_lens + 1  # a new array: batches have the old one
        steady = self._steady
        if delta.left:
            left = _read_steady("left", delta.left, steady)
            stays = ~np.isin(steady, left)
            steady, lens = steady[stays], lens[stays]
        joined = self._rows.read("joined", delta.joined)
        joined_lens = read_array(
            "delta.joined_seq_lens", delta.joined_seq_lens, INT32, len(joined), "delta.joined"
        )
        if len(joined):
            _check_others("joined", joined, steady)
            steady = np.concatenate((steady, joined))
            lens = np.concatenate((lens, joined_lens))
        if delta.removed:
            gone = self._rows.find_unused(steady)
            if len(gone):
                raise StepError(f"delta.left lacks row {gone[0]}, which is removed")
        self._steady, self._steady_lens = steady, lens

    def _lay_out(self, delta: worker_pb2.StepDelta, limits: StepLimits) -> _Layout:
        steady, lens = self._steady, self._steady_lens
        num_steady = len(steady)
        fed = np.zeros(num_steady, np.int32)
        if delta.steady_ids:
            data = delta.steady_ids
            fed = read_array("delta.steady_ids", data, INT32, num_steady, "the steady rows")
            check_range("delta.steady_ids", fed, 0, limits.vocab_size)
        rows = self._rows.read("rows", delta.rows)
        every = np.arange(num_steady, dtype=np.int32)
        if len(rows) == 0:
            _check_empty(delta)
            if num_steady == 0:
                raise StepError("delta: neither steady nor other rows: a step has 1 at least")
            check_range("delta: steady seq_lens", lens, 0, limits.max_model_len)
            ones = np.ones(num_steady, np.int32)
            return _Layout(steady, fed, lens, lens, ones, every, every)
        _check_others("rows", rows, steady)
        seq_lens, query_lens, samples, input_ids = _read_others(delta, len(rows), limits)
        check_range("delta: steady seq_lens", lens, 0, limits.max_model_len)
        ends = np.cumsum(query_lens, dtype=np.int32)
        offsets = np.repeat(seq_lens - (ends - query_lens), query_lens)
        positions = np.arange(len(input_ids), dtype=np.int32) + offsets
        last = ends[samples] - 1 + num_steady
        return _Layout(
            rows=np.concatenate((steady, rows)),
            input_ids=np.concatenate((fed, input_ids)),
            positions=np.concatenate((lens, positions)),
            seq_lens=np.concatenate((lens, seq_lens)),
            query_lens=np.concatenate((np.ones(num_steady, np.int32), query_lens)),
            sample_index=np.concatenate((every, last)),
            sample_sequence=np.concatenate(
                (every, np.flatnonzero(samples).astype(np.int32) + num_steady)
            ),
        )

    def _refer(self, request: worker_pb2.StepRequest, shared: Mapping[int, int]) -> TokenReferences:
        """Where the steady ones feed what the step before samples."""
        steady = self._steady
        delta = request.delta
        if delta.steady_samples and (delta.steady_ids or not delta.is_keyframe):
            raise StepError("delta.steady_samples came: only keyframes without steady_ids have it")
        if delta.steady_ids or len(steady) == 0:
            return NO_REFERENCES
        step_id = request.step_id - 1
        if step_id not in shared:
            raise StepError(
                f"delta.steady_ids is empty, so that samples of step {step_id} are fed: they are "
                f"kept of {sorted(shared)}"
            )
        samples = self._samples(request.delta, shared[step_id])
        return TokenReferences(
            rows=torch.from_numpy(np.arange(len(steady))),
            step_ids=torch.from_numpy(np.full(len(steady), step_id, np.int64)),
            sample_rows=torch.from_numpy(samples.astype(np.int64)),
        )

    def _samples(self, delta: worker_pb2.StepDelta, num_samples: int) -> Int32:
        """[S] of the step before, by who is steady in this one."""
        steady = self._steady
        if delta.is_keyframe:
            name, data = "delta.steady_samples", delta.steady_samples
            samples = read_array(name, data, INT32, len(steady), "the steady rows")
            check_range(name, samples, 0, num_samples)
            return samples
        samples = self._sample_of[steady]
        if (samples < 0).any():
            raise StepError(
                f"delta.steady_ids is empty, but row {steady[samples < 0][0]} has no sample in "
                "the step before"
            )
        return samples

    def _note_samples(self, layout: _Layout) -> None:
        self._sample_of[self._sampled] = -1
        self._sampled = layout.rows[layout.sample_sequence]
        self._sample_of[self._sampled] = np.arange(len(self._sampled), dtype=np.int32)

    def _batch(
        self,
        request: worker_pb2.StepRequest,
        layout: _Layout,
        references: TokenReferences,
        limits: StepLimits,
    ) -> Batch:
        delta = request.delta
        rows, seq_lens = layout.rows, layout.seq_lens
        if self._read is None or self._read[0] is not rows:
            self._read = rows, self._rows.ids(rows), self._rows.columns(rows)
        kinds = zip(limits.windows, limits.chunks, strict=True)
        return Batch(
            input_ids=_tensor(layout.input_ids),
            positions=torch.from_numpy(layout.positions),
            sequence_ids=self._read[1],
            seq_lens=torch.from_numpy(seq_lens),
            query_lens=torch.from_numpy(layout.query_lens),
            block_tables=self._rows.tables(
                rows,
                [first_seen(seq_lens, window, chunk) for window, chunk in kinds],
                seq_lens + layout.query_lens,
                limits.block_size,
            ),
            block_copies=decode_copies(delta, limits.num_blocks),
            sample_index=torch.from_numpy(layout.sample_index),
            sample_sequence=torch.from_numpy(layout.sample_sequence),
            sampling=self._read[2],
            sampler_inputs=decode_inputs(
                request.sampler_inputs, len(layout.sample_index), limits.vocab_size
            ),
            defers_sampling=delta.defer_sampling,
            step_id=request.step_id,
            references=references,
            shares_samples=request.share_samples,
            **decode_scores(delta, len(layout.input_ids), limits.vocab_size),
        )


def _read_others(
    delta: worker_pb2.StepDelta, count: int, limits: StepLimits
) -> tuple[Int32, Int32, NDArray[np.bool_], Int32]:
    """seq_lens, query_lens, samples and input_ids of those that aren't steady."""
    seq_lens = read_array("delta.seq_lens", delta.seq_lens, INT32, count, "delta.rows")
    query_lens = read_array("delta.query_lens", delta.query_lens, INT32, count, "delta.rows")
    check_range("delta.query_lens", query_lens, 1, limits.max_model_len + 1)
    check_range("delta.seq_lens", seq_lens, 0, limits.max_model_len + 1)
    totals = seq_lens + query_lens
    check_range("delta.seq_lens + query_lens", totals, 1, limits.max_model_len + 1)
    samples = np.frombuffer(delta.samples, np.uint8)
    if len(samples) != count or (samples > 1).any():
        raise StepError(f"delta.samples {samples.tolist()} must be 0 or 1 for each of {count} rows")
    input_ids = read_array("delta.input_ids", delta.input_ids, INT32)
    check_range("delta.input_ids", input_ids, 0, limits.vocab_size)
    total = int(query_lens.sum(dtype=np.int64))
    if total != len(input_ids):
        raise StepError(f"delta.query_lens sum to {total}, input_ids has {len(input_ids)} tokens")
    return seq_lens, query_lens, samples.astype(np.bool_), input_ids


def _check_empty(delta: worker_pb2.StepDelta) -> None:
    for name, data in (
        ("seq_lens", delta.seq_lens),
        ("query_lens", delta.query_lens),
        ("samples", delta.samples),
        ("input_ids", delta.input_ids),
    ):
        if data:
            raise StepError(f"delta.{name} has {len(data)} bytes, delta.rows is empty")


def _read_steady(name: str, data: bytes, steady: Rows) -> Rows:
    rows = read_rows(name, data)
    others = rows[~np.isin(rows, steady)]
    if len(others):
        raise StepError(f"delta.{name} has row {others[0]}, which isn't steady")
    return rows


def _check_others(name: str, rows: Rows, steady: Rows) -> None:
    both = rows[np.isin(rows, steady)]
    if len(both):
        raise StepError(f"delta.{name} has row {both[0]}, which is steady")


def _tensor(array: Int32) -> torch.Tensor:
    """A view where that may be written to: a message's bytes may not."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _compare(
    batch: Batch,
    request: worker_pb2.StepRequest,
    limits: StepLimits,
    shared: Mapping[int, int],
) -> None:
    whole = worker_pb2.StepRequest(
        step_id=request.step_id,
        plan=request.checked_plan,
        sampler_inputs=request.sampler_inputs,
        share_samples=request.share_samples,
    )
    difference = find_difference(batch, decode_plan(whole, limits, shared))
    if difference is not None:
        raise StepError(f"step {request.step_id}, by its delta and as a whole: {difference}")
