"""The requests that an engine serves: whose they are, and what goes to whom."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import InvalidRequestError, LockstepError
from runtime.request import FinishReason, RequestFailure, RequestOutput
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.sequence import Sequence as Choice


@dataclass(frozen=True, slots=True)
class Recipients:
    """Choices of one client's requests, in columns."""

    request_ids: tuple[int, ...]
    choices: tuple[int, ...]
    num_cached_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A token for each of the recipients, as most steps bring them.

    Its outputs are made when it is iterated, so that the reader's thread pays for them.
    """

    recipients: Recipients
    token_ids: tuple[int, ...]
    reasons: tuple[FinishReason | None, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[RequestOutput]:
        to = self.recipients
        tokens = zip(self.token_ids, strict=True)  # each as a tuple
        return map(
            RequestOutput, to.request_ids, tokens, self.reasons, to.choices, to.num_cached_tokens
        )


Outputs = list[RequestOutput | RequestFailure] | TokenBatch
# Called at most once a step, on the engine's thread; must not block.
Sink = Callable[[Outputs], None]


class Client(Protocol):
    """Whom requests come from."""

    sink: Sink


# A client and the id that it has for its request.
Key = tuple[Client, int]


@dataclass(slots=True, eq=False)
class _Live:
    client: Client
    request_id: int
    sequence_ids: set[int]  # of the choices that haven't ended


@dataclass(frozen=True, slots=True)
class _Share:
    """Which of the steady choices are one client's."""

    client: Client
    places: tuple[int, ...]
    recipients: Recipients

    @property
    def unfinished(self) -> tuple[None, ...]:
        return (None,) * len(self.places)


class LiveRequests:
    """Requests that haven't ended, by client and by sequence. For one thread."""

    def __init__(self) -> None:
        self._requests: dict[Key, _Live] = {}
        self._owners: dict[int, tuple[_Live, int]] = {}  # by sequence id, with the choice
        self._steady: tuple[Choice, ...] = ()  # of the last step, if none of them has ended
        self._shares: list[_Share] = []  # of them, once they were the same in two steps

    def __len__(self) -> int:
        return len(self._requests)

    def check_free(self, key: Key) -> None:
        """Raises InvalidRequestError: the client has a request with this id."""
        if key in self._requests:
            raise InvalidRequestError(f"request_id={key[1]} is in use by a request that runs")

    def of(self, client: Client) -> list[int]:
        """The ids of a client's requests."""
        return [request_id for owner, request_id in self._requests if owner is client]

    def add(self, key: Key, choices: Mapping[int, Choice]) -> None:
        """`choices` are those that haven't ended, by their index; the key is free."""
        live = _Live(*key, {each.sequence_id for each in choices.values()})
        self._requests[key] = live
        for index, each in choices.items():
            self._owners[each.sequence_id] = (live, index)

    def remove(self, key: Key) -> list[int]:
        """Forgets a request, to which nothing goes any more; returns its live sequences."""
        live = self._requests.pop(key, None)
        if live is None:
            return []
        self._steady, self._shares = (), []
        for sequence_id in live.sequence_ids:
            del self._owners[sequence_id]
        return sorted(live.sequence_ids)

    def remove_choice(self, key: Key, index: int) -> int | None:
        """Forgets one choice, and the request if it was the last; returns its live sequence."""
        live = self._requests.get(key)
        for sequence_id in live.sequence_ids if live is not None else ():
            if self._owners[sequence_id][1] == index:
                self._forget([sequence_id])
                return sequence_id
        return None

    def among(self, choices: Mapping[int, Choice]) -> dict[int, Choice]:
        """Those that haven't ended."""
        return {i: each for i, each in choices.items() if each.sequence_id in self._owners}

    def sequence_ids(self) -> list[int]:
        """Of all choices that haven't ended."""
        return list(self._owners)

    def key_of(self, sequence_id: int) -> Key | None:
        owner = self._owners.get(sequence_id)
        return None if owner is None else (owner[0].client, owner[0].request_id)

    def publish(self, output: SchedulerOutput, outcome: StepOutcome) -> None:
        """Gives each client what a step brought it, and forgets what has ended with it."""
        steady = output.steady
        is_same = steady is self._steady and len(outcome.sequences) == len(steady)
        if is_same and not (output.scheduled or outcome.logprobs):
            batches = self._of_steady(outcome)
        else:
            self._steady, self._shares = steady, []
            batches = self._of_each(outcome)
        self._forget(each.sequence_id for each in outcome.finished)
        for client, batch in batches:
            client.sink(batch)

    def _of_steady(self, outcome: StepOutcome) -> list[tuple[Client, Outputs]]:
        """What all of the steady choices got, which are those of the step before, and they alone.

        Nothing is done for a single choice but to put its token where its client finds it.
        """
        self._shares = self._shares or self._split(self._steady)
        batches: list[tuple[Client, Outputs]] = []
        for share in self._shares:
            tokens = tuple(map(outcome.token_ids.__getitem__, share.places))
            reasons: tuple[FinishReason | None, ...] = share.unfinished
            if outcome.finished:
                reasons = tuple(self._steady[place].finish_reason for place in share.places)
            batches.append((share.client, TokenBatch(share.recipients, tokens, reasons)))
        return batches

    def _split(self, choices: Sequence[Choice]) -> list[_Share]:
        columns: defaultdict[Client, list[tuple[int, int, int, int]]] = defaultdict(list)
        for place, choice in enumerate(choices):
            live, index = self._owners[choice.sequence_id]
            cached = choice.first_choice.num_cached_tokens
            columns[live.client].append((place, live.request_id, index, cached))
        shares = []
        for client, rows in columns.items():
            places, request_ids, indices, cached_tokens = zip(*rows, strict=True)
            shares.append(_Share(client, places, Recipients(request_ids, indices, cached_tokens)))
        return shares

    def _of_each(self, outcome: StepOutcome) -> list[tuple[Client, Outputs]]:
        outputs: defaultdict[Client, list[RequestOutput | RequestFailure]] = defaultdict(list)
        logprobs, scores, starts = outcome.logprobs, outcome.scores, outcome.starts
        for choice, token in zip(outcome.sequences, outcome.token_ids, strict=True):
            live, index = self._owners[choice.sequence_id]
            reason = choice.finish_reason
            cached = choice.first_choice.num_cached_tokens
            output = RequestOutput(live.request_id, (token,), reason, index, cached)
            if logprobs or scores:
                output = _with_logprobs(output, outcome, choice.sequence_id)
            if starts:
                output = output._replace(start=starts.get(choice.sequence_id))
            outputs[live.client].append(output)
        sampled = {each.sequence_id for each in outcome.sequences} if scores else ()
        for sequence_id in scores:
            if sequence_id not in sampled and sequence_id in self._owners:
                live, index = self._owners[sequence_id]
                output = RequestOutput(live.request_id, (), None, index)
                outputs[live.client].append(_with_logprobs(output, outcome, sequence_id))
        return list(outputs.items())

    def fail_all(self, error: LockstepError) -> None:
        failures: defaultdict[Client, list[RequestOutput | RequestFailure]] = defaultdict(list)
        for client, request_id in self._requests:
            failures[client].append(RequestFailure(request_id, error))
        self._requests.clear()
        self._owners.clear()
        self._steady, self._shares = (), []
        for client, batch in failures.items():
            client.sink(batch)

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._steady, self._shares = (), []
            live, _ = self._owners.pop(sequence_id)
            live.sequence_ids.remove(sequence_id)
            if not live.sequence_ids:
                del self._requests[live.client, live.request_id]


def _with_logprobs(output: RequestOutput, outcome: StepOutcome, sequence_id: int) -> RequestOutput:
    logprobs = outcome.logprobs.get(sequence_id)
    return output._replace(
        logprobs=() if logprobs is None else (logprobs,),
        scores=tuple(outcome.scores.get(sequence_id, ())),
    )
