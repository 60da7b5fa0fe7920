from dataclasses import replace

import pytest
import torch

from tests.host_reads import DEVICE, FakeDevice
from tests.tiny_models import Row, make_batch
from workers.batch import NUM_SHARED_STEPS, TokenReferences
from workers.models.capture import TO_DEVICE
from workers.parallel import TensorParallel, Topology
from workers.shared_samples import SharedSamples
from workers.staging import ALIGNMENT, FIRST_NUMBERS, Staging, count_numbers, pack, unpack

pytestmark = pytest.mark.cpu


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(0, 1000, shape, dtype=torch.int32)


def test_on_the_cpu_tensors_stay_where_they_are() -> None:
    tensors = [ints(3), ints(2, 2)]
    moved = Staging(torch.device("cpu")).move(tensors)
    assert all(one is other for one, other in zip(moved, tensors, strict=True))


def test_what_is_packed_comes_out_again() -> None:
    """Views of one tensor, that begin where kernels like them to."""
    tensors = [ints(5), ints(0), ints(3, 7).T, ints(4, 0), ints(1, 4), ints(6)]
    count = count_numbers(tensors)
    packed = pack(tensors, torch.full((count + 3,), -1, dtype=torch.int32))
    assert len(packed) == count
    views = unpack(packed, tensors)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.storage_offset() % ALIGNMENT == 0
        assert view.is_contiguous()


def test_other_number_formats_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="one number format"):
        pack([torch.zeros(2, dtype=torch.int64)], torch.zeros(4, dtype=torch.int32))


class WatchedEvent:
    """The copy from a buffer ends when somebody waits for it: till then it must stay as it is."""

    def __init__(self, number: int, memory: "WatchedMemory") -> None:
        self._number = number
        self._memory = memory
        self._buffers = [(each, each.clone()) for each in memory.buffers]

    def synchronize(self) -> None:
        self._memory.waits.append(self._number)
        changed = [i for i, (each, was) in enumerate(self._buffers) if not each.equal(was)]
        # The other buffer was filled meanwhile.
        assert self._number % 2 not in changed


class WatchedMemory:
    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.waits: list[int] = []
        self._marks = 0

    def allocate(self, count: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(count, dtype=torch.int32))
        return self.buffers[-1]

    def mark(self, device: torch.device) -> WatchedEvent:
        assert device == DEVICE
        self._marks += 1
        return WatchedEvent(self._marks - 1, self)


def test_a_buffer_is_filled_again_once_its_copy_has_ended() -> None:
    memory = WatchedMemory()
    staging = Staging(DEVICE, memory)

    with torch.inference_mode(), FakeDevice() as device:
        for step in range(1, 6):
            sent = [torch.full((5,), step, dtype=torch.int32), ints(step)]
            moved = staging.move(sent)
            assert [each.tolist() for each in moved] == [each.tolist() for each in sent]
            assert memory.waits == list(range(step - 2))

    copies = [each for each in device.found if TO_DEVICE in each]
    assert len(copies) == 5
    assert [len(each) for each in memory.buffers] == [FIRST_NUMBERS] * 2


def test_a_buffer_that_is_too_small_is_replaced_after_its_copy_has_ended() -> None:
    memory = WatchedMemory()
    staging = Staging(DEVICE, memory)
    many = ints(FIRST_NUMBERS + 1)

    with torch.inference_mode(), FakeDevice():
        for sent in (ints(3), ints(3), many):
            (moved,) = staging.move([sent])
            assert moved.tolist() == sent.tolist()

    assert memory.waits == [0]
    assert [len(each) for each in memory.buffers] == [FIRST_NUMBERS] * 2 + [2 * FIRST_NUMBERS]


def test_samples_of_earlier_steps_are_fed_without_a_wait() -> None:
    shared = SharedSamples(TensorParallel(Topology(tp=1), 0, None), DEVICE)
    row = Row(sequence_id=1, tokens=[4, 5, 6, 7], seq_len=0, block_tables=[[0]])
    batch = replace(make_batch([row]), shares_samples=True)
    refer = TokenReferences(
        rows=torch.tensor([0, 2, 3]),
        step_ids=torch.tensor([11, 12, 11]),
        sample_rows=torch.tensor([1, 0, 0]),
    )

    with torch.inference_mode(), FakeDevice() as device:
        for step_id in range(10, 13):
            sampled = (torch.arange(2) + 10 * step_id).to(DEVICE)
            shared.share(replace(batch, step_id=step_id), sampled)
        input_ids = batch.input_ids.to(DEVICE)
        device.found.clear()
        fed = shared.resolve(replace(batch, references=refer), input_ids)
        found = list(device.found)
        same = shared.resolve(batch, input_ids)

    assert all(TO_DEVICE in each for each in found)
    assert fed.tolist() == [111, 5, 120, 110]
    assert same is input_ids
    assert input_ids.tolist() == [4, 5, 6, 7]


def test_samples_are_forgotten_after_some_steps() -> None:
    shared = SharedSamples(TensorParallel(Topology(tp=1), 0, None))
    row = Row(sequence_id=1, tokens=[4], seq_len=0, block_tables=[[0]])
    refer = TokenReferences(
        rows=torch.tensor([0]), step_ids=torch.tensor([1]), sample_rows=torch.tensor([0])
    )
    batch = replace(make_batch([row]), shares_samples=True, references=refer)

    for step_id in range(1, NUM_SHARED_STEPS + 1):
        shared.share(replace(batch, step_id=step_id), torch.tensor([step_id + 20]))
    assert shared.resolve(batch, batch.input_ids).tolist() == [21]

    shared.share(replace(batch, step_id=NUM_SHARED_STEPS + 1), torch.tensor([9]))
    with pytest.raises(KeyError):
        shared.resolve(batch, batch.input_ids)
