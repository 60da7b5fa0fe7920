"""What has come for one request and not been taken yet."""

import asyncio
from itertools import chain

from runtime.errors import LockstepError
from runtime.request import RequestOutput


class Inbox:
    """Outputs of a request's choices, and what failed it. One task may wait.

    A choice that isn't taken for a while is given as one output; a failure comes after the tokens
    that were there before it.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._unfinished = set(range(num_choices))
        self._ended: set[int] = set()  # by their taker
        self._outputs: dict[int, list[RequestOutput]] = {}  # by choice, the longest waiting first
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

    def fail(self, error: LockstepError) -> None:
        self._failure = error
        self._arrival.set()

    async def take(self) -> RequestOutput | None:
        """Everything of the choice that waits longest; None after the end of the last choice.

        Raises the request's failure.
        """
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if not self._unfinished:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        parts = self._outputs.pop(next(iter(self._outputs)))
        if len(parts) == 1:
            return parts[0]
        return parts[-1]._replace(
            token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            scores=tuple(chain.from_iterable(part.scores for part in parts)),
        )
