"""Makes a scheduler decide again what a recorded one has decided: no weights, no workers."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from protos import recording_pb2
from protos.recording_pb2 import Record
from runtime.arrays import INT32, unpack
from runtime.errors import CapacityError
from runtime.recording.arrivals import decode_arrival
from runtime.recording.compare import find_difference
from runtime.recording.encoder import encode_decision
from runtime.recording.rows import RowsReader
from runtime.recording.setup import decode_setup
from runtime.request import FinishReason, TokenLogprobs
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.prefix_cache import StoredNode
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.snapshot import SchedulerState, set_state
from runtime.scheduling.step_plan import Fault, StepPlan, StepResult

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first that was found."""

    step_id: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step_id}, {self.what}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a replay came."""

    num_steps: int  # that are the same
    difference: Difference | None


def replay_scheduler(records: Iterable[Record]) -> Verdict:
    """Stops at the first difference. The records begin where a scheduler can be replayed."""
    replay: SchedulerReplay | None = None
    for record in records:
        if replay is None:
            replay = SchedulerReplay(record.header)
        difference = replay.apply(record)
        if difference is not None:
            return Verdict(replay.num_steps, difference)
    return Verdict(0 if replay is None else replay.num_steps, None)


class SchedulerReplay:
    """A scheduler of the recorded setup, and the table that flattens its decisions."""

    def __init__(self, header: recording_pb2.Header) -> None:
        setup = decode_setup(header.setup)
        parts = setup.parts()
        self.num_steps = 0
        self.scheduler = Scheduler(
            parts.cache,
            policy=parts.policy,
            limits=parts.limits,
            eos_token_ids=parts.eos_token_ids,
        )
        self._table = BatchTable(
            max_num_seqs=setup.limits.max_num_seqs,
            num_groups=len(setup.layout.groups),
            vocab_size=setup.vocab_size,
        )
        self._rows = RowsReader()
        self._untold: set[int] = set()  # removed before the start
        self._decision = recording_pb2.Decision()
        self._replayed = recording_pb2.Decision()
        self._plan: StepPlan | None = None
        self._in_flight: deque[StepPlan] = deque()
        self._is_new = True

    def apply(self, record: Record) -> Difference | None:
        """The next record; returns how what comes of it differs."""
        match record.WhichOneof("record"):
            case "header":
                self._rows = RowsReader()
            case "decision":
                return self._decide(record.decision)
            case "plan":
                return self._compare(record.plan)
            case "result":
                return self._update(record.result)
            case _:
                self._follow(record)
        return None

    def _follow(self, record: Record) -> None:
        """What happened to the scheduler between two steps."""
        match record.WhichOneof("record"):
            case "state":
                if self._is_new:
                    self._start_from(record.state)
            case "arrival":
                self._is_new = False
                self._add(record.arrival)
            case "abort":
                reason = FinishReason(record.abort.reason)
                self.scheduler.abort(record.abort.sequence_id, record.abort.now, reason=reason)
            case "expiry":
                self.scheduler.expire(record.expiry.now)
                self.scheduler.take_dropped()
            case "restart":
                self.scheduler.restart(is_outside=record.restart.is_outside)
                self.scheduler.take_dropped()
                self._in_flight.clear()

    def _start_from(self, state: recording_pb2.SchedulerState) -> None:
        set_state(self.scheduler, decode_state(state))
        self._untold = set(state.removed)

    def _add(self, arrival: recording_pb2.Arrival) -> None:
        try:
            self.scheduler.add(decode_arrival(arrival), arrival.now)
        except CapacityError:
            return  # as it was: the queue is full in both

    def _decide(self, decision: recording_pb2.Decision) -> Difference | None:
        output = self.scheduler.schedule(decision.now)
        self.scheduler.take_dropped()
        self._decision, self._replayed = decision, encode_decision(output, decision.now)
        if self._untold:
            told = [each for each in decision.removed if each not in self._untold]
            self._untold.difference_update(decision.removed)
            del decision.removed[:]
            decision.removed.extend(told)
        if output is None and decision.step_id:
            return Difference(decision.step_id, "all rows: nothing runs, recorded a step")
        if output is None:
            return None
        plan = self._table.flatten(output)
        if not decision.step_id:
            first = int(plan.sequence_ids[0])
            what = f"row 0, order: sequence {first} runs, recorded nothing runs"
            return Difference(plan.step_id, what)
        self._in_flight.append(plan)
        self._plan = plan
        return None

    def _compare(self, recorded: recording_pb2.Plan) -> Difference | None:
        rows = self._rows.decode(recorded)
        plan = self._plan
        assert plan is not None, "a plan comes after its decision"
        what = find_difference(recorded, rows, self._decision, plan, self._replayed)
        if plan.step_id != recorded.step_id:
            what = f"all rows: it is step {plan.step_id} in the replay"
        if what is not None:
            return Difference(recorded.step_id, what)
        self.num_steps += 1
        return None

    def _update(self, recorded: recording_pb2.Result) -> Difference | None:
        outcome = self.scheduler.update(
            decode_result(recorded, self._in_flight.popleft()), recorded.now
        )
        failed = (sequence for sequence, _ in outcome.failed)
        ended = [each.sequence_id for each in (*outcome.finished, *failed)]
        if ended != list(recorded.finished):
            what = f"its result ends sequences {ended}, recorded {list(recorded.finished)}"
            return Difference(recorded.step_id, what)
        return None


def decode_result(recorded: recording_pb2.Result, plan: StepPlan) -> StepResult:
    """As far as a scheduler goes by it: scores are numbers, or none."""
    bad = {*unpack(INT32, "bad_scores", recorded.bad_scores)}
    scores = [
        TokenLogprobs(NAN if index in bad else 0.0, (), ()) for index in range(recorded.num_scores)
    ]
    rows = unpack(INT32, "fault_rows", recorded.fault_rows)
    return StepResult(
        step_id=recorded.step_id,
        sequence_ids=plan.sequence_ids[plan.sample_sequence].tolist(),
        token_ids=unpack(INT32, "token_ids", recorded.token_ids),
        faults=dict(zip(rows, map(Fault, recorded.faults), strict=True)),
        scores=scores,
    )


def decode_state(state: recording_pb2.SchedulerState) -> SchedulerState:
    return SchedulerState(
        num_arrivals=state.num_arrivals,
        last_step_id=state.last_step_id,
        updated_at=state.updated_at,
        step_seconds=tuple(state.step_seconds),
        last_token_s=state.last_token_s,
        mean_wait_s=state.mean_wait_s,
        is_backed_up=state.is_backed_up,
        removed=tuple(state.removed),
        empty_blocks=list(state.empty_blocks),
        cached_first_blocks=list(state.cached_first_blocks),
        cached_blocks=list(state.cached_blocks),
        nodes=[
            StoredNode(
                parent=each.parent - 1 if each.parent else None,
                salt=each.salt,
                tokens=each.tokens,
                digest=each.digest,
                blocks=tuple(block - 1 if block else None for block in each.blocks),
            )
            for each in state.nodes
        ],
    )
