"""Where a step that was planned again isn't the one that was recorded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protos import recording_pb2
from runtime.recording.rows import Digests, Rows
from runtime.scheduling.step_plan import StepPlan

# Of tokens and ids in messages.
SHOWN = 8


def find_difference(
    recorded: recording_pb2.Plan,
    rows: Rows,
    decision: recording_pb2.Decision,
    plan: StepPlan,
    replayed: recording_pb2.Decision,
) -> str | None:
    """The first difference of a step, with its row; None: there is none.

    `rows` and `decision` are what was recorded, `plan` and `replayed` what came of it again.
    """
    return (
        _of_order(rows, plan)
        or _of_tokens(rows, plan)
        or _of_blocks(rows, decision, replayed)
        or _of_events(decision, replayed)
        or _of_digests(recorded, plan)
    )


def _of_order(rows: Rows, plan: StepPlan) -> str | None:
    recorded, replayed = rows.sequence_ids.tolist(), plan.sequence_ids.tolist()
    for row, (mine, theirs) in enumerate(zip(replayed, recorded, strict=False)):
        if mine != theirs:
            return f"row {row}, order: sequence {mine}, recorded sequence {theirs}"
    if len(recorded) != len(replayed):
        row = min(len(recorded), len(replayed))
        more, fewer = ("recorded", "replayed") if len(recorded) > row else ("replayed", "recorded")
        sequence_id = (recorded if len(recorded) > row else replayed)[row]
        return f"row {row}, order: sequence {sequence_id} {more}, none {fewer}"
    return None


def _of_tokens(rows: Rows, plan: StepPlan) -> str | None:
    again = Rows.of(plan)
    for row, sequence_id in enumerate(rows.sequence_ids.tolist()):
        where = f"row {row}, sequence {sequence_id}, tokens fed"
        mine = int(again.seq_lens[row]), int(again.query_lens[row])
        theirs = int(rows.seq_lens[row]), int(rows.query_lens[row])
        if mine != theirs:
            return (
                f"{where}: {mine[1]} after {mine[0]} in the cache, "
                f"recorded {theirs[1]} after {theirs[0]}"
            )
    if np.array_equal(rows.input_ids, again.input_ids):
        return None
    for row, sequence_id in enumerate(rows.sequence_ids.tolist()):
        tokens, other = again.tokens(row), rows.tokens(row)
        if tokens != other:
            place = next(
                i for i, pair in enumerate(zip(tokens, other, strict=True)) if len({*pair}) > 1
            )
            end = place + SHOWN
            return (
                f"row {row}, sequence {sequence_id}, tokens fed: from the {place + 1}th on "
                f"{tokens[place:end]}, recorded {other[place:end]}"
            )
    raise AssertionError("the rows are alike, and their tokens aren't")


def _of_blocks(
    rows: Rows, decision: recording_pb2.Decision, replayed: recording_pb2.Decision
) -> str | None:
    mine = {each.sequence_id: _blocks_of(each) for each in replayed.changed}
    theirs = {each.sequence_id: _blocks_of(each) for each in decision.changed}
    for row, sequence_id in enumerate(rows.sequence_ids.tolist()):
        if mine.get(sequence_id) != theirs.get(sequence_id):
            return (
                f"row {row}, sequence {sequence_id}, blocks: {_shown(mine.get(sequence_id))}, "
                f"recorded {_shown(theirs.get(sequence_id))}"
            )
    return None


def _of_events(decision: recording_pb2.Decision, replayed: recording_pb2.Decision) -> str | None:
    for name, mine, theirs in (
        ("removed", list(replayed.removed), list(decision.removed)),
        ("added", list(replayed.added), list(decision.added)),
        ("copies", _pairs(replayed.copies), _pairs(decision.copies)),
        (
            "order of table changes",
            [each.sequence_id for each in replayed.changed],
            [each.sequence_id for each in decision.changed],
        ),
    ):
        if mine != theirs:
            return f"{name}: {mine[:SHOWN]}, recorded {theirs[:SHOWN]}"
    return None


def _of_digests(recorded: recording_pb2.Plan, plan: StepPlan) -> str | None:
    again = Digests.of(plan)
    for name, mine, theirs in (
        ("positions or references of the tokens fed", again.tokens, recorded.tokens_digest),
        ("samples or their parameters", again.sampling, recorded.sampling_digest),
    ):
        if mine != theirs:
            return f"{name}: the plan's arrays aren't those recorded"
    return None


def _blocks_of(change: recording_pb2.TableChange) -> tuple[list[int], list[list[int]]]:
    return list(change.first_blocks), [list(each.ids) for each in change.appended]


def _shown(blocks: tuple[Sequence[int], Sequence[Sequence[int]]] | None) -> str:
    if blocks is None:
        return "none"
    parts = [
        f"{list(new[:SHOWN])}{'...' if len(new) > SHOWN else ''} from {first} on"
        for first, new in zip(*blocks, strict=True)
    ]
    return " and ".join(parts)


def _pairs(copies: bytes) -> list[Any]:
    pairs: list[Any] = np.frombuffer(copies, "<i4").reshape(-1, 2).tolist()
    return pairs
