"""The text of one choice's output, to where it ends."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from runtime.frontend.stop import StopFinder, StopMatch
from runtime.frontend.text import Detokenizer, Tokenizer
from runtime.sampling_params import SamplingParams


class TextDelta(NamedTuple):
    """How an output goes on."""

    text: str
    num_tokens: int  # of those given, how many belong to the output: the others come after its end
    stop: str | None = None  # the stop string that ended the output


class OutputText:
    """One choice's output as text: detokenized, and cut at the first stop string.

    Streamed or at once, the text is the same: the deltas put together, for every cut of the tokens
    into calls. Once a delta has a `stop`, the output has ended; what comes after has no part in it.

    A character counts as text of the token that makes it certain. A stop string ends the output
    where that token comes after the first `min_tokens` of the output, though it may begin before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_ids=kept_special_ids,
        )
        self._finder = StopFinder(params.stop) if params.stop else None
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._has_ended = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Goes on with `token_ids`, after which there may be more."""
        if self._has_ended:
            return TextDelta("", 0)
        if self._finder is None:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        return self._push(self._finder, token_ids)

    def finish(
        self, token_ids: Sequence[int] = (), *, ends_with_stop_token: bool = False
    ) -> TextDelta:
        """Goes on with `token_ids`, the last ones, and gives out what was held back.

        With `ends_with_stop_token`, the last of them is a stop token or an end-of-sequence token:
        its text is left out, unless the parameters keep what stopped the output.
        """
        left_out = int(ends_with_stop_token and not self._keeps_stop)
        assert left_out <= len(token_ids), "an output that ends with a token has one"
        delta = self.push(token_ids[: len(token_ids) - left_out])
        if self._has_ended:
            return delta
        self._has_ended = True
        rest = self._detokenizer.finish()
        if self._finder is None:
            return TextDelta(delta.text + rest, len(token_ids))
        found = self._finder.push(rest, counts=self._num_tokens > self._min_tokens)
        if isinstance(found, StopMatch):
            return TextDelta(delta.text + self._cut(found), delta.num_tokens, found.stop)
        return TextDelta(delta.text + found + self._finder.flush(), len(token_ids))

    def _push(self, finder: StopFinder, token_ids: Iterable[int]) -> TextDelta:
        texts: list[str] = []
        num_tokens = 0
        for num_tokens, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            found = finder.push(
                self._detokenizer.push([token_id]), counts=self._num_tokens > self._min_tokens
            )
            if isinstance(found, StopMatch):
                self._has_ended = True
                return TextDelta("".join(texts) + self._cut(found), num_tokens, found.stop)
            texts.append(found)
        return TextDelta("".join(texts), num_tokens)

    def _cut(self, match: StopMatch) -> str:
        return match.before + match.stop if self._keeps_stop else match.before
