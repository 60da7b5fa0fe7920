"""Reads a step's result: whether it is that step's, and what it says of single sequences."""

import math

from runtime.errors import InvalidRequestError, LockstepError, ModelOutputError, WorkerError
from runtime.request import TokenLogprobs
from runtime.scheduling.output import SchedulerOutput
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import Fault, StepResult


def check_result(result: StepResult, output: SchedulerOutput, wanted: list[int]) -> None:
    """Raises WorkerError: it is another step's, or not for the sequences in `wanted`."""
    step_id = output.step_id
    if result.step_id != step_id:
        raise WorkerError(f"result of step {result.step_id} for step {step_id}")
    if result.sequence_ids != wanted or len(result.token_ids) != len(wanted):
        raise WorkerError(
            f"step {step_id}: {len(result.token_ids)} tokens for sequences "
            f"{result.sequence_ids}, wanted for {wanted}"
        )
    num_scored = sum(len(each.scored) for each in output.scheduled)
    if len(result.scores) != num_scored:
        raise WorkerError(
            f"step {step_id}: {len(result.scores)} scores of prompt tokens, wanted {num_scored}"
        )


def find_faults(
    output: SchedulerOutput, sampled: list[Sequence], result: StepResult
) -> dict[Sequence, Fault]:
    """The live sequences whose rows couldn't be sampled or scored."""
    if not (result.faults or result.scores):
        return {}
    faults = {sampled[row]: fault for row, fault in result.faults.items()}
    for sequence, scores in _scores_of(output, result):
        if any(math.isnan(each.logprob) for each in scores):
            faults[sequence] = Fault.INVALID_LOGITS
    return {each: fault for each, fault in faults.items() if each.finish_reason is None}


def take_scores(output: SchedulerOutput, result: StepResult) -> dict[int, list[TokenLogprobs]]:
    """The logprobs of live sequences' prompts, by sequence id."""
    return {
        sequence.sequence_id: scores
        for sequence, scores in _scores_of(output, result)
        if sequence.finish_reason is None
    }


def _scores_of(
    output: SchedulerOutput, result: StepResult
) -> list[tuple[Sequence, list[TokenLogprobs]]]:
    found = []
    start = 0
    for each in output.scheduled if result.scores else ():
        count = len(each.scored)
        if count:
            found.append((each.sequence, result.scores[start : start + count]))
            start += count
    return found


def take_tokens(sequences: list[Sequence], token_ids: list[int]) -> None:
    """Gives `sequences` a token each."""
    for sequence, token in zip(sequences, token_ids, strict=True):
        sequence.token_ids.append(token)
        sequence.num_pending_tokens -= 1


def error_of(fault: Fault) -> LockstepError:
    """What to tell the client of a sequence that couldn't be sampled."""
    match fault:
        case Fault.INVALID_LOGITS:
            return ModelOutputError(
                "the model's logits for this request are NaN or infinite: its numbers overflowed, "
                "or its weights are damaged; this request alone has ended"
            )
        case Fault.EMPTY_SUPPORT:
            return InvalidRequestError(
                "no token is left to sample: allowed_token_ids, bad_words, logit_bias, min_tokens "
                "and the output's form together forbid all of them"
            )
