"""The requests that an engine serves: whose they are, and what goes to whom."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import LockstepError
from runtime.request import RequestFailure, RequestOutput
from runtime.scheduling.output import StepOutcome
from runtime.scheduling.sequence import Sequence as Choice

Outputs = list[RequestOutput | RequestFailure]
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


class LiveRequests:
    """Requests that haven't ended, by client and by sequence. For one thread."""

    def __init__(self) -> None:
        self._requests: dict[Key, _Live] = {}
        self._owners: dict[int, tuple[_Live, int]] = {}  # by sequence id, with the choice

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    def of(self, client: Client) -> list[int]:
        """The ids of a client's requests."""
        return [request_id for owner, request_id in self._requests if owner is client]

    def add(self, key: Key, choices: Sequence[Choice]) -> None:
        live = _Live(*key, {each.sequence_id for each in choices})
        self._requests[key] = live
        for index, each in enumerate(choices):
            self._owners[each.sequence_id] = (live, index)

    def remove(self, key: Key) -> list[int]:
        """Forgets a request, to which nothing goes any more; returns its live sequences."""
        live = self._requests.pop(key, None)
        if live is None:
            return []
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

    def key_of(self, sequence_id: int) -> Key | None:
        owner = self._owners.get(sequence_id)
        return None if owner is None else (owner[0].client, owner[0].request_id)

    def publish(self, outcome: StepOutcome) -> None:
        """Gives each client what a step brought it, and forgets what has ended with it."""
        outputs: defaultdict[Client, Outputs] = defaultdict(list)
        logprobs, scores = outcome.logprobs, outcome.scores
        for choice, token in zip(outcome.sequences, outcome.token_ids, strict=True):
            live, index = self._owners[choice.sequence_id]
            reason = choice.finish_reason
            cached = (choice.fork_of or choice).num_cached_tokens
            output = RequestOutput(live.request_id, (token,), reason, index, cached)
            if logprobs or scores:
                output = _with_logprobs(output, outcome, choice.sequence_id)
            outputs[live.client].append(output)
        sampled = {each.sequence_id for each in outcome.sequences} if scores else ()
        for sequence_id in scores:
            if sequence_id not in sampled and sequence_id in self._owners:
                live, index = self._owners[sequence_id]
                output = RequestOutput(live.request_id, (), None, index)
                outputs[live.client].append(_with_logprobs(output, outcome, sequence_id))
        self._forget(each.sequence_id for each in outcome.finished)
        for client, batch in outputs.items():
            client.sink(batch)

    def fail_all(self, error: LockstepError) -> None:
        failures: defaultdict[Client, Outputs] = defaultdict(list)
        for client, request_id in self._requests:
            failures[client].append(RequestFailure(request_id, error))
        self._requests.clear()
        self._owners.clear()
        for client, batch in failures.items():
            client.sink(batch)

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
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
