"""Late workers to which each step goes over the wire twice, as a delta and whole."""

from protos import worker_pb2
from runtime.executor.codec import encode_delta, encode_step
from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.step_plan import StepPlan
from tests.delayed import DelayedOracle
from tests.scheduling import VOCAB_SIZE, OracleExecutor
from workers.batch import NUM_SHARED_STEPS, Batch
from workers.batch_difference import find_difference
from workers.codec import StepLimits, decode_plan
from workers.delta_codec import DeltaDecoder


def limits_of_layout(layout: CacheLayout, *, max_model_len: int) -> StepLimits:
    return StepLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        windows=tuple(group.window for group in layout.groups),
        chunks=tuple(group.chunk for group in layout.groups),
    )


class DeltaReader:
    """A rank's end of one stream: decodes deltas, and asserts that they say what plans do."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self.decoder = DeltaDecoder()
        self.sizes: list[int] = []  # bytes of each delta
        self.shared: dict[int, int] = {}

    def take(self, plan: StepPlan, *, is_compared: bool = True) -> Batch:
        options = {"epoch": 1, "return_input_hash": False, "share_samples": True}
        message = encode_delta(plan, **options)
        self.sizes.append(len(message))
        delta = worker_pb2.StepRequest.FromString(message)
        batch = self.decoder.decode(delta, self._limits, self.shared)
        if is_compared:
            whole = worker_pb2.StepRequest.FromString(encode_step(plan, **options))
            wanted = decode_plan(whole, self._limits, self.shared)
            assert find_difference(batch, wanted) is None
        self.shared[plan.step_id] = len(batch.sample_index)
        self.shared.pop(plan.step_id - NUM_SHARED_STEPS, None)
        return batch


class DeltaWorkers(DelayedOracle):
    """An oracle that is late, behind both codecs."""

    def __init__(self, oracle: OracleExecutor, *, max_model_len: int) -> None:
        super().__init__(oracle)
        self._limits = limits_of_layout(oracle.layout, max_model_len=max_model_len)
        self._reader = DeltaReader(self._limits)

    def submit(self, plan: StepPlan) -> None:
        self._reader.take(plan)
        super().submit(plan)

    def restart(self) -> None:
        super().restart()
        self._reader = DeltaReader(self._limits)
