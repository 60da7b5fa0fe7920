import pytest
import torch

from workers.staging import ALIGNMENT, Staging, count_numbers, pack, unpack

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
