"""From a prompt and parameters to text: what every way in has in common.

gRPC, HTTP and batch files read their own requests and write their own answers; between the two is
a `TextStream`.
"""

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from runtime.errors import InvalidRequestError
from runtime.frontend.choice import Choice
from runtime.frontend.prompts import PromptReader
from runtime.frontend.resume import NoOutputs, Resume, check_fingerprint, past_of
from runtime.frontend.resume_proof import ResumeProofs
from runtime.request import (
    FinishReason,
    ModelInfo,
    Request,
    RequestOutput,
    ResumedChoice,
    Start,
    TokenLogprobs,
)
from runtime.sampling_params import CompleteParams, SamplingParams, fork_seed

MAX_CACHE_SALT_BYTES = 256


class Outputs(Protocol):
    """What engines bring for one request; ends as `generation.Generation` does."""

    async def __anext__(self) -> RequestOutput: ...

    def end(self, choice: int) -> None: ...

    async def aclose(self) -> None: ...


class Engines(Protocol):
    """Engines of one model, to which a request may be given."""

    @property
    def model(self) -> ModelInfo: ...

    def generate(self, request: Request, *, num_scored: int = 0) -> Outputs:
        """The request, whose id is chosen here, is sent when its first output is asked for.

        Of the prompt's log probabilities the first `num_scored` aren't brought.
        Raises InvalidRequestError at once: the model can't serve it. Raises UnavailableError: no
        engine is there.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an operator grants a request, less than what the engine could do."""

    max_prompt_tokens: int | None = None
    max_n: int | None = None
    max_logprobs: int | None = None

    def check(self, params: SamplingParams, *, num_prompt_tokens: int) -> None:
        """Raises InvalidRequestError, naming field, value and limit."""
        asked = (
            ("prompt tokens", num_prompt_tokens, "max_prompt_tokens"),
            ("n", params.n, "max_n"),
            ("logprobs", params.logprobs, "max_logprobs"),
            ("prompt_logprobs", params.prompt_logprobs, "max_logprobs"),
        )
        for name, value, limit in asked:
            most = getattr(self, limit)
            if most is not None and value is not None and value > most:
                raise InvalidRequestError(
                    f"{name}={value} is more than this server's {limit}={most}"
                )


class Delta(NamedTuple):
    """How one choice goes on."""

    index: int  # type: ignore[assignment]  # of the choice; hides tuple.index
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, if wanted
    # The next tokens of the prompt, if wanted; its first has no log probability.
    scores: tuple[tuple[int, TokenLogprobs | None], ...]
    finish_reason: FinishReason | None
    stop: str | int | None  # the stop string or the token that ended it


class Usage(NamedTuple):
    """Tokens of a request: its prompt, all its choices, and what of the prompt was cached."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Generator:
    """Starts requests on engines. For one event loop."""

    def __init__(
        self,
        engines: Engines,
        prompts: PromptReader,
        limits: Limits,
        proofs: ResumeProofs | None = None,
    ) -> None:
        """Without `proofs` none are given, and all that is resumed counts as new."""
        self.prompts = prompts
        self._engines = engines
        self._limits = limits
        self._proofs = proofs
        self._replaying = asyncio.Lock()  # for the turns of those that are resumed

    @property
    def model(self) -> ModelInfo:
        return self._engines.model

    async def start(
        self,
        prompt: Sequence[int],
        asked: SamplingParams,
        *,
        tenant: str,
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        resume: Resume | None = None,
        kept_special_ids: Collection[int] = (),
    ) -> "TextStream":
        """Checks a request; the engine gets it when the stream is first read.

        `kept_special_ids` are tokens that texts have even where they have no special ones.
        With `resume`, `prompt` is what that says, and the choices go on after what it has of them.
        Raises InvalidRequestError: a field is out of range. Raises FingerprintError: another model
        has begun it. Raises UnavailableError: no engine is there.
        """
        _check_salt(cache_salt)
        self._limits.check(asked, num_prompt_tokens=len(prompt))
        params = self.model.complete(asked, num_prompt_tokens=len(prompt))
        if resume is None:
            seed = secrets.randbits(64) if params.seed is None else params.seed
        else:
            check_fingerprint(resume, self.model)
            seed = resume.seed
        request = Request(
            request_id=0,
            prompt_token_ids=prompt,
            params=params,
            seed=seed,
            bad_words=await self.prompts.bad_words(params),
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            timeout_s=timeout_s,
        )
        request.check(self.model)  # before a tokenizer sees the ids
        choices = [
            Choice(self.prompts.tokenizer, prompt, params, kept_special_ids)
            for _ in range(params.n)
        ]
        proof = b"" if self._proofs is None else self._proofs.of(request, self.model.fingerprint)
        past: tuple[ResumedChoice, ...] = ()
        if resume is not None:
            past = await past_of(resume, choices, params, self.model, self._replaying)
            accepted = self._was_accepted(request, resume)
            request = replace(request, resumed=past, was_accepted=accepted)
        num_scored = 0 if resume is None else resume.num_prompt_logprobs
        return TextStream(
            self._outputs_of(request, num_scored),
            prompt,
            params,
            choices,
            past,
            seed=seed,
            num_scored=num_scored,
            resume_proof=proof,
        )

    def _was_accepted(self, request: Request, resume: Resume) -> bool:
        if self._proofs is None:
            return False
        return self._proofs.use(resume.proof, request, self.model.fingerprint)

    def _outputs_of(self, request: Request, num_scored: int) -> Outputs:
        """`num_scored` tokens of the prompt, of which the first has none, have their scores."""
        if request.resumed and all(each.has_ended for each in request.resumed):
            return NoOutputs()
        return self._engines.generate(request, num_scored=max(num_scored - 1, 0))


class TextStream:
    """One request's choices as text and tokens, as they come. Close it in the end.

    Iterating raises what `generation.Generation` does.
    """

    def __init__(
        self,
        outputs: Outputs,
        prompt: Sequence[int],
        params: CompleteParams,
        choices: list[Choice],
        past: Sequence[ResumedChoice],
        *,
        seed: int,
        num_scored: int,
        resume_proof: bytes = b"",
    ) -> None:
        """`choices` have read what there is of them in `past`.

        `num_scored` tokens of the prompt have got their log probabilities, and all where there is
        output of choice 0.
        """
        self.prompt = prompt
        self.resume_proof = resume_proof  # for who resumes it
        self.params = params
        self.seed = seed  # of the request; each choice has its own
        self.start: Start | None = None  # once the first token is there
        self._outputs = outputs
        self._choices = choices
        self._num_unfinished = sum(not each.has_ended for each in choices)
        self._num_output_tokens = sum(len(each.token_ids) for each in past)
        self._num_cached_tokens = 0
        # Of the prompt's tokens, the next whose log probability is to be told.
        is_scored = bool(past) and bool(past[0].token_ids)
        self._next_scored = None if params.prompt_logprobs is None or is_scored else num_scored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self.is_complete:
            await self.aclose()
            raise StopAsyncIteration
        output = await self._outputs.__anext__()
        index = output.choice
        part = self._choices[index].extend(output)
        if part.ends_early:
            self._outputs.end(index)
        if self.start is None:
            self.start = output.start
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._num_output_tokens += len(part.token_ids)
        self._num_unfinished -= part.finish_reason is not None
        return Delta(
            index,
            part.text,
            part.token_ids,
            part.logprobs,
            self._scored(output),
            part.finish_reason,
            part.stop,
        )

    @property
    def is_complete(self) -> bool:
        """All choices have ended."""
        return not self._num_unfinished

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), self._num_output_tokens, self._num_cached_tokens)

    def seed_of(self, index: int) -> int:
        return fork_seed(self.seed, index)

    async def aclose(self) -> None:
        """Ends what hasn't ended. May be called twice."""
        await self._outputs.aclose()

    def _scored(self, output: RequestOutput) -> tuple[tuple[int, TokenLogprobs | None], ...]:
        if self._next_scored is None or output.choice:
            return ()
        entries: list[tuple[int, TokenLogprobs | None]] = []
        if self._next_scored == 0:
            entries.append((self.prompt[0], None))
            self._next_scored = 1
        end = self._next_scored + len(output.scores)
        entries += zip(self.prompt[self._next_scored : end], output.scores, strict=True)
        self._next_scored = end
        return tuple(entries)


def _check_salt(salt: str) -> None:
    num_bytes = len(salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt of {num_bytes} bytes is longer than {MAX_CACHE_SALT_BYTES}"
        )
