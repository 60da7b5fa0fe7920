"""Going on with a request that another server, or this one before, has begun to answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import FingerprintError, InvalidRequestError
from runtime.frontend.choice import Choice
from runtime.request import FinishReason, ModelInfo, RequestOutput, ResumedChoice
from runtime.sampling_params import MAX_CHOICES, CompleteParams
from runtime.scheduling.ending import ends_with

# In all choices of a request together: their text takes a second or two, and other resumptions as
# much longer.
MAX_RESUMED_TOKENS = 262_144
# So many are read at once, which takes 1 to 2 ms: until then the loop does nothing else.
NUM_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a client has received of a stream that broke."""

    seed: int
    prompt_token_ids: Sequence[int]
    fingerprint: str
    outputs: tuple[tuple[int, ...], ...]  # of the first choices
    num_prompt_logprobs: int = 0  # entries received
    proof: bytes = b""  # that it was let in before; see `resume_proof`


def check_fingerprint(resume: Resume, model: ModelInfo) -> None:
    """Raises FingerprintError: another model has given those tokens."""
    if resume.fingerprint != model.fingerprint:
        raise FingerprintError(
            f"resume.model_fingerprint={resume.fingerprint!r} isn't that of the model that is "
            f"served here, {model.fingerprint!r}: its tokens would be others"
        )


def check_size(num_choices: int, num_tokens: int) -> None:
    """Of all outputs, before they are copied. Raises InvalidRequestError: they are too many."""
    if num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"resume.outputs has {num_choices} entries: must be at most {MAX_CHOICES}"
        )
    if num_tokens > MAX_RESUMED_TOKENS:
        raise InvalidRequestError(
            f"resume.outputs has {num_tokens} tokens in all: must be at most {MAX_RESUMED_TOKENS}; "
            "send the request anew"
        )


async def past_of(
    resume: Resume,
    choices: Sequence[Choice],
    params: CompleteParams,
    model: ModelInfo,
    turns: asyncio.Lock,
) -> tuple[ResumedChoice, ...]:
    """What there is of each choice, which reads it: its text isn't given again.

    It is read a part at a time, as it comes to its turn among all that are read, and the loop runs
    in between. Raises InvalidRequestError: that can't have been received.
    """
    check_size(len(resume.outputs), sum(map(len, resume.outputs)))
    if len(resume.outputs) > len(choices):
        raise InvalidRequestError(
            f"resume.outputs has {len(resume.outputs)} entries: must be at most n={len(choices)}"
        )
    if resume.num_prompt_logprobs > len(resume.prompt_token_ids):
        raise InvalidRequestError(
            f"resume.num_prompt_logprobs={resume.num_prompt_logprobs} must be at most the "
            f"{len(resume.prompt_token_ids)} tokens of the prompt"
        )
    outputs = [*resume.outputs, *[()] * (len(choices) - len(resume.outputs))]
    past = []
    for place, (choice, token_ids) in enumerate(zip(choices, outputs, strict=True)):
        reader = _Reader(f"resume.outputs[{place}]", choice, token_ids, params, model)
        for start in range(0, len(token_ids), NUM_AT_ONCE):
            async with turns:
                reader.read(start)
                await asyncio.sleep(0)
        past.append(ResumedChoice(token_ids, choice.has_ended))
    return tuple(past)


class _Reader:
    """Reads what there is of one choice."""

    def __init__(
        self,
        name: str,
        choice: Choice,
        token_ids: tuple[int, ...],
        params: CompleteParams,
        model: ModelInfo,
    ) -> None:
        """`name` is that of the field."""
        if len(token_ids) > params.max_tokens:
            raise InvalidRequestError(
                f"{name} has {len(token_ids)} tokens: more than max_tokens={params.max_tokens}"
            )
        self._name = name
        self._choice = choice
        self._token_ids = token_ids
        self._params = params
        self._model = model

    def read(self, start: int) -> None:
        """The next tokens. Raises InvalidRequestError: they can't have been received."""
        token_ids, total = self._token_ids[start : start + NUM_AT_ONCE], len(self._token_ids)
        for extreme in (min(token_ids), max(token_ids)):
            if not 0 <= extreme < self._model.vocab_size:
                raise InvalidRequestError(
                    f"{self._name} has token id {extreme}: must be in "
                    f"[0, {self._model.vocab_size}), the vocabulary"
                )
        ends = False
        for count, token_id in enumerate(token_ids, start=start + 1):
            ends = ends_with(token_id, count, self._params, self._model.eos_token_ids)
            if ends and count < total:
                raise self._goes_on(count)
        reason = None
        if ends:
            reason = FinishReason.STOP
        elif start + len(token_ids) == self._params.max_tokens:
            reason = FinishReason.LENGTH
        part = self._choice.extend(RequestOutput(0, token_ids, reason))
        end = start + len(part.token_ids)
        if self._choice.has_ended and end < total:
            raise self._goes_on(end)

    def _goes_on(self, count: int) -> InvalidRequestError:
        return InvalidRequestError(f"{self._name} goes on after its end, which is token {count}")


class NoOutputs:
    """Of a request whose choices had ended when it was resumed."""

    async def __anext__(self) -> RequestOutput:
        raise StopAsyncIteration

    def end(self, choice: int) -> None:
        """There is none that runs."""

    async def aclose(self) -> None:
        """There is nothing to end."""
