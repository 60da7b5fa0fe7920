"""What has come for one request and not been taken yet."""

import asyncio
from itertools import accumulate, chain

from runtime.errors import LockstepError
from runtime.request import RequestOutput

# With 20 others beside each token it is a message of half a megabyte; clients of gRPC take four.
MAX_JOINED_LOGPROBS = 1024


class Inbox:
    """Outputs of a request's choices, and what failed it. One task may wait.

    A choice that isn't taken for a while is given as one output, or a few where it has many log
    probabilities; a failure comes after the tokens that were there before it.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._unfinished = set(range(num_choices))
        self._ended: set[int] = set()  # by their taker
        self._outputs: dict[int, list[RequestOutput]] = {}  # by choice, the longest waiting first
        self.was_refused = False  # the engine has failed it without ever taking it
        self._failure: LockstepError | None = None
        self._arrival = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Nothing more comes."""
        return not self._unfinished or self._failure is not None

    def put(self, output: RequestOutput) -> None:
        """Raises ValueError: the request has no such choice, or it has ended."""
        if output.choice in self._ended:  # it was under way
            return
        if output.choice not in self._unfinished:
            raise ValueError(
                f"index={output.choice} must be one of {self._num_choices} choices that haven't "
                "ended"
            )
        if output.finish_reason is not None:
            self._unfinished.remove(output.choice)
        self._outputs.setdefault(output.choice, []).append(output)
        self._arrival.set()

    def end(self, choice: int) -> None:
        """Its taker wants no more of a choice."""
        self._ended.add(choice)
        self._unfinished.discard(choice)
        self._outputs.pop(choice, None)

    def fail(self, error: LockstepError, *, was_refused: bool = False) -> None:
        self._failure = error
        self.was_refused = was_refused
        self._arrival.set()

    async def take(self) -> RequestOutput | None:
        """What there is of the choice that waits longest; None after the end of the last choice.

        Raises the request's failure.
        """
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if not self._unfinished:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        choice, parts = next(iter(self._outputs.items()))
        del self._outputs[choice]
        count = _num_to_join(parts)
        if count < len(parts):
            self._outputs[choice] = parts[count:]
            parts = parts[:count]
        if len(parts) == 1:
            return parts[0]
        return parts[-1]._replace(
            token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            scores=tuple(chain.from_iterable(part.scores for part in parts)),
            start=next((part.start for part in parts if part.start is not None), None),
        )


def _num_to_join(parts: list[RequestOutput]) -> int:
    """How many of them, at least one, fit into one output."""
    totals = accumulate(len(part.logprobs) + len(part.scores) for part in parts)
    return max(1, sum(total <= MAX_JOINED_LOGPROBS for total in totals))
