"""One choice of a request as its client gets it: text and tokens up to where it ends."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from runtime.frontend.output_text import OutputText, TextDelta
from runtime.frontend.text import Tokenizer
from runtime.request import FinishReason, RequestOutput, TokenLogprobs
from runtime.sampling_params import SamplingParams


class Part(NamedTuple):
    """How a choice goes on."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, if wanted
    finish_reason: FinishReason | None
    stop: str | int | None  # the stop string or the token that ended it
    ends_early: bool  # the engine doesn't know yet that it has ended


class Choice:
    """Without a tokenizer it has no text, and `params` no stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        self._text = None
        if tokenizer is not None:
            self._text = OutputText(tokenizer, prompt, params, kept_special_ids)
        self.has_ended = False

    def extend(self, output: RequestOutput) -> Part:
        """Goes on with what the engine has brought; not after it has ended."""
        assert not self.has_ended, "the choice has ended"
        token_ids, reason = output.token_ids, output.finish_reason
        delta = self._read(token_ids, reason)
        stop: str | int | None = delta.stop
        if stop is None and reason is FinishReason.STOP:
            stop = token_ids[-1]
        ends_early = delta.stop is not None and reason is None
        if delta.stop is not None:
            reason = FinishReason.STOP
        self.has_ended = reason is not None
        return Part(
            delta.text,
            token_ids[: delta.num_tokens],
            output.logprobs[: delta.num_tokens],
            reason,
            stop,
            ends_early,
        )

    def _read(self, token_ids: Sequence[int], reason: FinishReason | None) -> TextDelta:
        if self._text is None:
            return TextDelta("", len(token_ids))
        if reason is None:
            return self._text.push(token_ids)
        return self._text.finish(token_ids, ends_with_stop_token=reason is FinishReason.STOP)
