import pytest

from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.cache_layout import window_blocks
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.output import TableChange
from tests.scheduling import make_layout, make_sequence

pytestmark = pytest.mark.unit


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """A pool and what it has evicted."""
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.extend), evicted


def test_a_pool_hands_out_free_blocks_until_there_are_too_few() -> None:
    pool, _ = make_pool(3)
    first, second = pool.allocate(2), pool.allocate(1)
    assert sorted([*first, *second]) == [0, 1, 2]
    assert pool.allocate(1) is None
    pool.release(first)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(first)


def test_a_block_is_free_once_nobody_holds_it() -> None:
    pool, _ = make_pool(2)
    (block,) = pool.allocate(1)
    pool.share([block, block])
    for num_free in (1, 1, 2):
        pool.release([block])
        assert pool.num_free == num_free


def test_blocks_that_keep_a_prefix_are_evicted_last_in_the_order_of_release() -> None:
    pool, evicted = make_pool(4)
    blocks = pool.allocate(4)
    for block in (3, 1, 2):
        pool.keep([block])
    pool.release([2, 0, 1])
    pool.release([3], evict_first=True)
    assert (pool.num_free, pool.num_cached) == (4, 3)
    assert pool.allocate(1) == [0]
    assert evicted == []
    assert [pool.allocate(1) for _ in range(3)] == [[3], [2], [1]]
    assert evicted == [3, 2, 1]
    assert len(blocks) == 4


def test_a_kept_block_that_is_shared_again_is_not_evicted() -> None:
    pool, evicted = make_pool(2)
    for block in pool.allocate(2):
        pool.keep([block])
    pool.release([0, 1])
    assert pool.num_idle([[0, 1]]) == 2
    pool.share([0])
    assert pool.num_idle([[0, 1]]) == 1
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]
    assert evicted == [1]


def test_a_block_is_freed_by_all_of_its_holders_together() -> None:
    pool, _ = make_pool(4)
    pool.allocate(4)
    pool.share([0, 1])
    assert pool.num_freed([], still_held=[]) == 0
    assert pool.num_freed([[0, 2]], still_held=[]) == 1  # 0 is held once more
    assert pool.num_freed([[0, 2], [0, 1]], still_held=[]) == 2
    assert pool.num_freed([[0, 2], [0, 1]], still_held=[[2, 3]]) == 1


def test_a_pool_that_forgets_hands_out_without_evicting() -> None:
    pool, evicted = make_pool(2)
    for block in pool.allocate(2):
        pool.keep([block])
    pool.release([0, 1])
    pool.forget()
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.allocate(2)
    assert evicted == []


def test_releasing_twice_is_a_bug() -> None:
    pool, _ = make_pool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 is released"):
        pool.release(blocks)


@pytest.mark.parametrize(
    ("holders", "homes", "fault"),
    [
        ([], [], "not all blocks"),
        ([[0], [0]], [], "1 references, 2 holders"),
        ([[0]], [1], "knows other blocks"),
    ],
)
def test_invariants_see_what_is_wrong(
    holders: list[list[int]], homes: list[int], fault: str
) -> None:
    pool, _ = make_pool(2)
    pool.allocate(1)
    pool.check_invariants([[0]], [])
    with pytest.raises(AssertionError, match=fault):
        pool.check_invariants(holders, homes)


def test_tables_grow_by_whole_blocks_in_every_group() -> None:
    cache = CacheManager(make_layout(num_blocks=8, block_size=4, windows=(0, 0)))
    sequence = make_sequence(1, range(5))
    change, copies = cache.admit(sequence, cache.find_prefix(sequence), spare=0)
    assert copies == ()
    assert [len(blocks) for blocks in change.appended] == [2, 2]
    for _ in range(3):
        sequence.token_ids.append(7)
    assert cache.extend(sequence) == TableChange(1, (0, 0), ([], []))
    sequence.token_ids.append(7)
    grown = cache.extend(sequence)
    assert [len(blocks) for blocks in grown.appended] == [1, 1]
    assert cache.capacity(sequence) == 12
    assert cache.num_table_blocks == 6
    cache.check_invariants()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    cache = CacheManager(make_layout(num_blocks=4, block_size=4, windows=(0, 0)))
    one, other = make_sequence(1, range(4)), make_sequence(2, range(100, 105))
    cache.admit(one, cache.find_prefix(one), spare=0)
    one.token_ids.extend(range(8))
    assert cache.extend(one) is None
    assert cache.admit(other, cache.find_prefix(other), spare=0) is None
    assert cache.pool.num_free == 2
    assert cache.num_table_blocks == 2
    cache.check_invariants()


def test_admission_leaves_the_spare_blocks_free() -> None:
    cache = CacheManager(make_layout(num_blocks=4, block_size=4))
    sequence = make_sequence(1, range(8))
    assert cache.admit(sequence, cache.find_prefix(sequence), spare=3) is None
    assert cache.admit(sequence, cache.find_prefix(sequence), spare=2) is not None


def test_a_pool_smaller_than_the_windows_holds_shorter_sequences() -> None:
    layout = make_layout(num_blocks=9, block_size=4, windows=(0, 8), max_chunk_tokens=8)
    assert window_blocks(8, 8, 4) == 5
    assert layout.max_sequence_tokens == 4 * 4
    layout = make_layout(num_blocks=15, block_size=4, windows=(0, 8), max_chunk_tokens=8)
    assert layout.max_sequence_tokens == 10 * 4
