"""What offline generation gives back."""

from dataclasses import dataclass

from runtime.errors import LockstepError
from runtime.frontend.choice import Part
from runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs
from runtime.sampling_params import fork_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step brought: text that became certain, and tokens."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop: str | int | None  # the stop string or the token that ended it
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, if wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice of a prompt's answer; its seed reproduces it, with n=1 too."""

    prompt_token_ids: tuple[int, ...]
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason  # ABORT where there is an error
    stop: str | int | None  # the stop string or the token that ended it
    error: LockstepError | None  # why there is no more of it
    seed: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    logprobs: tuple[TokenLogprobs, ...] | None  # one for each token; None: not asked for
    # One for each token of the prompt, of choice 0; the first has none. None: not asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


class Draft:
    """What has come of one choice so far."""

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._scores: list[TokenLogprobs | None] = [None]
        self.error: LockstepError | None = None
        self._num_cached_tokens = 0
        self._finish_reason = FinishReason.ABORT  # unless it ends otherwise
        self._stop: str | int | None = None

    def extend(self, output: RequestOutput, part: Part) -> None:
        self.token_ids.extend(part.token_ids)
        self._texts.append(part.text)
        self._logprobs.extend(part.logprobs)
        self._scores.extend(output.scores)
        self._num_cached_tokens = output.num_cached_tokens
        self._finish_reason = part.finish_reason or FinishReason.ABORT
        self._stop = part.stop

    def completion(self) -> Completion:
        params = self.request.params
        is_scored = params.prompt_logprobs is not None and self._index == 0
        return Completion(
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            index=self._index,
            token_ids=tuple(self.token_ids),
            text="".join(self._texts),
            finish_reason=self._finish_reason if self.error is None else FinishReason.ABORT,
            stop=self._stop,
            error=self.error,
            seed=fork_seed(self.request.seed, self._index),
            num_cached_tokens=self._num_cached_tokens,
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=tuple(self._scores) if is_scored else None,
        )
