"""Going on with a request that another server, or this one before, has begun to answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import FingerprintError, InvalidRequestError
from runtime.frontend.choice import Choice
from runtime.request import FinishReason, ModelInfo, RequestOutput, ResumedChoice
from runtime.sampling_params import CompleteParams
from runtime.scheduling.ending import ends_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a client has received of a stream that broke."""

    seed: int
    prompt_token_ids: Sequence[int]
    fingerprint: str
    outputs: tuple[tuple[int, ...], ...]  # of the first choices
    num_prompt_logprobs: int = 0  # entries received


def check_fingerprint(resume: Resume, model: ModelInfo) -> None:
    """Raises FingerprintError: another model has given those tokens."""
    if resume.fingerprint != model.fingerprint:
        raise FingerprintError(
            f"resume.model_fingerprint={resume.fingerprint!r} isn't that of the model that is "
            f"served here, {model.fingerprint!r}: its tokens would be others"
        )


def past_of(
    resume: Resume, choices: Sequence[Choice], params: CompleteParams, model: ModelInfo
) -> tuple[ResumedChoice, ...]:
    """What there is of each choice, which reads it: its text isn't given again.

    Raises InvalidRequestError: that can't have been received.
    """
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
    return tuple(
        _replay(f"resume.outputs[{place}]", choice, token_ids, params, model)
        for place, (choice, token_ids) in enumerate(zip(choices, outputs, strict=True))
    )


def _replay(
    name: str,
    choice: Choice,
    token_ids: tuple[int, ...],
    params: CompleteParams,
    model: ModelInfo,
) -> ResumedChoice:
    if not token_ids:
        return ResumedChoice()
    if len(token_ids) > params.max_tokens:
        raise InvalidRequestError(
            f"{name} has {len(token_ids)} tokens: more than max_tokens={params.max_tokens}"
        )
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < model.vocab_size:
            raise InvalidRequestError(
                f"{name} has token id {extreme}: must be in [0, {model.vocab_size}), the vocabulary"
            )
    for count, token_id in enumerate(token_ids, start=1):
        if ends_with(token_id, count, params, model.eos_token_ids) and count < len(token_ids):
            raise _goes_on(name, count)
    reason = None
    if ends_with(token_ids[-1], len(token_ids), params, model.eos_token_ids):
        reason = FinishReason.STOP
    elif len(token_ids) == params.max_tokens:
        reason = FinishReason.LENGTH
    part = choice.extend(RequestOutput(0, token_ids, reason))
    if len(part.token_ids) < len(token_ids):
        raise _goes_on(name, len(part.token_ids))
    return ResumedChoice(token_ids, choice.has_ended)


def _goes_on(name: str, count: int) -> InvalidRequestError:
    return InvalidRequestError(f"{name} goes on after its end, which is token {count}")
