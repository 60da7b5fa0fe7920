from array import array
from collections.abc import Sequence as Ids

import pytest

from runtime.scheduling.prefix_cache import Hash, PrefixCache, sha256_digest
from runtime.scheduling.scheduler import Scheduler
from tests.scheduling import make_layout, make_scheduler, make_sequence
from tests.steps import (
    OracleRun,
    assert_right,
    drain,
    finish,
    ids,
    num_cached,
    squeeze,
    step,
)

pytestmark = pytest.mark.unit

PROMPT = list(range(1, 13))  # three blocks of four


def serve(
    scheduler: Scheduler, sequence_id: int, prompt: Ids[int], *, max_tokens: int = 1, salt: str = ""
) -> None:
    scheduler.add(make_sequence(sequence_id, prompt, max_tokens=max_tokens, cache_salt=salt))
    drain(scheduler)


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        (PROMPT[:3], 0),
        (PROMPT[:4], 0),  # the last token is computed always
        (PROMPT[:5], 4),
        (PROMPT[:8], 4),
        (PROMPT[:9], 8),
        (PROMPT, 8),
        ([*PROMPT, 1], 12),
        ([*PROMPT, *PROMPT], 12),
        ([*PROMPT[:6], 99, *PROMPT[7:]], 4),
        ([99, *PROMPT], 0),
        ([*PROMPT[4:], 1], 0),
    ],
)
def test_a_hit_is_of_whole_blocks_and_leaves_a_token(prompt: list[int], hit: int) -> None:
    scheduler = make_scheduler(block_size=4)
    serve(scheduler, 1, PROMPT)
    sequence = make_sequence(2, prompt)
    scheduler.add(sequence)
    (scheduled,) = step(scheduler).scheduled
    assert scheduled.num_computed_tokens == sequence.num_cached_tokens == hit
    assert scheduled.num_scheduled_tokens == len(prompt) - hit


def test_salts_isolate() -> None:
    scheduler = make_scheduler(block_size=4)
    serve(scheduler, 1, PROMPT, salt="a")
    assert num_cached(scheduler, PROMPT, salt="a") == 12
    assert num_cached(scheduler, PROMPT) == num_cached(scheduler, PROMPT, salt="b") == 0
    serve(scheduler, 2, PROMPT, salt="b")
    squeeze(scheduler, 3)
    assert num_cached(scheduler, PROMPT, salt="a") == 0
    assert num_cached(scheduler, PROMPT, salt="b") == 12


def test_blocks_are_shareable_only_once_their_step_is_acknowledged() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, PROMPT))
    for before, after in ((0, 8), (8, 12)):
        output = scheduler.schedule()
        assert num_cached(scheduler, PROMPT) == before
        finish(scheduler, output)
        assert num_cached(scheduler, PROMPT) == after


def test_a_step_that_is_lost_makes_nothing_shareable() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence(1, PROMPT))
    scheduler.schedule()
    scheduler.restart()
    assert num_cached(scheduler, PROMPT) == 0


def test_an_abort_in_flight_shares_what_is_acknowledged_alone() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, PROMPT))
    step(scheduler)
    output = scheduler.schedule()
    scheduler.abort(1)
    assert num_cached(scheduler, PROMPT) == 8
    finish(scheduler, output)
    assert num_cached(scheduler, PROMPT) == 12


def test_a_prompt_that_is_scored_is_computed_whole_and_still_written() -> None:
    scheduler = make_scheduler(block_size=4)
    serve(scheduler, 1, PROMPT[:8])
    sequence = make_sequence(2, PROMPT, params={"prompt_logprobs": 0})
    scheduler.add(sequence)
    (scheduled,) = step(scheduler).scheduled
    assert scheduled.num_computed_tokens == sequence.num_cached_tokens == 0
    assert num_cached(scheduler, PROMPT) == 12


def test_without_prefix_cache_nothing_is_kept() -> None:
    scheduler = make_scheduler(block_size=4, prefix_cache=False)
    serve(scheduler, 1, PROMPT)
    assert scheduler.cache.pool.num_cached == 0
    assert num_cached(scheduler, PROMPT) == 0


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    run = OracleRun(make_scheduler(num_blocks=6, block_size=4))
    old = make_sequence(1, [1] * 7, max_tokens=6, seed=1)
    young = make_sequence(2, [2] * 11, max_tokens=10, seed=2)
    run.scheduler.add(old)
    run.scheduler.add(young)
    admissions = []
    while run.scheduler.has_work:
        output = run.step()
        if young in output.added:
            (scheduled,) = (each for each in output.scheduled if each.sequence is young)
            admissions.append((scheduled.num_computed_tokens, scheduled.num_scheduled_tokens))
    assert admissions == [(0, 11), (12, 1)]
    assert young.num_preemptions == 1
    assert young.num_cached_tokens == 0  # what a client is told: of its prompt, at first
    assert_right([old, young])


def test_a_next_turn_finds_prompt_and_answer() -> None:
    run = OracleRun(make_scheduler(block_size=4))
    first = make_sequence(1, PROMPT, max_tokens=9, ignore_eos=True)
    run.finish(first)
    second = make_sequence(2, [*first.token_ids, 7, 7], max_tokens=9)
    run.finish(second)
    assert second.num_cached_tokens == 20  # of 21 tokens; the last of them was never fed
    assert_right([first, second])


def test_an_answer_is_shareable_only_once_it_has_ended() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence(1, PROMPT, max_tokens=9))
    for _ in range(8):
        step(scheduler)
    said = [*PROMPT, *[5] * 8]
    assert num_cached(scheduler, said) == 12
    drain(scheduler)
    assert num_cached(scheduler, said) == 20


def test_the_tail_is_evicted_before_the_head() -> None:
    scheduler = make_scheduler(block_size=4)
    serve(scheduler, 1, PROMPT)
    hits = []
    for _ in range(3):
        hits.append(num_cached(scheduler, PROMPT))
        squeeze(scheduler, 1)
        scheduler.check_invariants()
    assert hits == [12, 8, 4]
    assert num_cached(scheduler, PROMPT) == 0


def test_who_was_used_longest_ago_is_evicted_first() -> None:
    scheduler = make_scheduler(block_size=4)
    prompts = {1: [1] * 8, 2: [2] * 8, 3: [3] * 8}
    for sequence_id, prompt in prompts.items():
        serve(scheduler, sequence_id, prompt)
    serve(scheduler, 4, [*prompts[1], 9])  # uses the oldest once more
    squeeze(scheduler, 3)
    assert [num_cached(scheduler, prompt) for prompt in prompts.values()] == [8, 0, 4]


def test_empty_blocks_are_handed_out_before_any_prefix_is_lost() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    serve(scheduler, 1, PROMPT)
    scheduler.add(make_sequence(2, [9] * 20))
    step(scheduler)
    assert scheduler.cache.pool.num_free == 3
    assert num_cached(scheduler, PROMPT) == 12


def test_a_shared_block_is_not_evicted_while_it_is_used() -> None:
    run = OracleRun(make_scheduler(num_blocks=8, block_size=4))
    first = make_sequence(1, PROMPT, max_tokens=1)
    run.finish(first)
    user = make_sequence(2, [*PROMPT, 1], max_tokens=8, seed=2)
    other = make_sequence(3, [9] * 15, max_tokens=1, seed=3)
    run.finish(user, other)
    assert user.num_cached_tokens == 12
    assert_right([first, user, other])


def test_idle_cached_blocks_count_as_free_only_once() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    serve(scheduler, 1, PROMPT)
    scheduler.add(
        make_sequence(2, [*PROMPT, 1], max_tokens=3)
    )  # all four blocks, three of them hits
    scheduler.add(make_sequence(3, [9], max_tokens=1))
    assert ids(step(scheduler).added) == [2]


def test_a_parent_evicted_under_the_child_of_a_copy_comes_back() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_sequence(1, [*PROMPT[:4], 9], max_tokens=1))
    scheduler.add(make_sequence(2, PROMPT, max_tokens=4))  # holds a copy of the first block
    step(scheduler)
    assert num_cached(scheduler, PROMPT) == 12
    squeeze(scheduler, 1)  # the block of sequence 1, which has ended
    scheduler.check_invariants()
    assert num_cached(scheduler, PROMPT) == 0  # its children are there, but it isn't
    serve(scheduler, 3, [*PROMPT[:4], 8])
    assert num_cached(scheduler, PROMPT) == 12


def test_a_copy_takes_the_place_of_an_original_that_is_gone() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_sequence(1, [*PROMPT[:4], 9], max_tokens=1))
    scheduler.add(make_sequence(2, [*PROMPT[:4], 8], max_tokens=4))
    step(scheduler)
    squeeze(scheduler, 1)
    assert num_cached(scheduler, PROMPT) == 0
    drain(scheduler)
    assert num_cached(scheduler, PROMPT[:4]) == 4
    assert num_cached(scheduler, [*PROMPT[:4], 8, 5, 5, 5]) == 8


def test_restart_forgets_everything() -> None:
    scheduler = make_scheduler(block_size=4)
    serve(scheduler, 1, PROMPT)
    scheduler.add(make_sequence(2, PROMPT))
    step(scheduler)
    scheduler.restart()
    scheduler.check_invariants()
    assert num_cached(scheduler, PROMPT) == 0
    assert scheduler.cache.pool.num_cached == 0
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks


def make_tree(*, root: bytes = b"secret", hash_fn: Hash = sha256_digest) -> PrefixCache:
    return PrefixCache(make_layout(block_size=2), root=root, hash_fn=hash_fn)


def hashes_of(tree: PrefixCache, tokens: Ids[int], *, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    tree.hash_blocks(hashes, array("i", tokens), len(tokens) // 2, salt)
    return hashes


def test_hashes_chain_and_depend_on_secret_and_salt() -> None:
    tree = make_tree()
    tokens = [1, 2, 3, 4]
    hashes = hashes_of(tree, tokens)
    assert hashes == hashes_of(tree, tokens)
    assert hashes_of(tree, [1, 2, 3, 5])[0] == hashes[0]
    assert hashes_of(tree, [2, 2, 3, 4])[1] != hashes[1]
    assert hashes_of(tree, tokens, salt="a") != hashes
    assert hashes_of(make_tree(root=b"other"), tokens) != hashes


def test_hashes_are_extended_not_made_again() -> None:
    seen: list[bytes] = []
    tree = make_tree(hash_fn=lambda data: seen.append(data) or sha256_digest(data))
    tokens = array("i", range(8))
    hashes: list[bytes] = []
    tree.hash_blocks(hashes, tokens, 2, "")
    tree.hash_blocks(hashes, tokens, 4, "")
    tree.hash_blocks(hashes, tokens, 3, "")
    assert len(seen) == 1 + 4  # the root of the salt and each block
    assert hashes == hashes_of(make_tree(), range(8))


def test_a_collision_is_neither_found_nor_overwrites() -> None:
    tree = make_tree(hash_fn=lambda data: b"same")

    def extend(tokens: Ids[int], *, salt: str = "") -> list[int]:
        count = len(tokens) // 2
        blocks = list(range(count))
        return tree.extend(
            [], [b"same"] * count, array("i", tokens), count, salt, tables=[blocks], firsts=[0]
        )

    assert extend([1, 2, 1, 2]) == [0]  # the second block's hash is taken by the first
    assert extend([3, 4]) == []
    assert extend([1, 2]) == []  # a copy
    assert extend([1, 2], salt="other") == []
    tree.check_invariants()
    assert tree.find([b"same"], array("i", [3, 4]), 1, "") == []
    (node,) = tree.find([b"same"] * 2, array("i", [1, 2, 1, 2]), 2, "")
    assert node.blocks == [0]
    assert tree.find([b"same"], array("i", [1, 2]), 1, "other") == []
