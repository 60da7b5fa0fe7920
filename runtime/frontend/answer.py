"""The messages of one request's stream."""

from collections.abc import Sequence

from protos import common_pb2, inference_pb2
from runtime.frontend.text import Detokenizer, Tokenizer
from runtime.request import RequestOutput
from runtime.sampling_params import fork_seed


class Answer:
    """Turns the outputs of a request's choices into messages: text and tokens, usage at the end."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokenizer: Tokenizer | None,
        *,
        num_choices: int,
        seed: int,
    ) -> None:
        """`request_id` is the client's label; without a tokenizer messages carry no text."""
        self._request_id = request_id
        self._num_prompt_tokens = len(prompt)
        self._num_output_tokens = 0
        self._num_unfinished = num_choices
        self._choices = [
            _Choice(
                fork_seed(seed, index),
                None if tokenizer is None else Detokenizer(tokenizer, prompt),
            )
            for index in range(num_choices)
        ]

    def extend(self, output: RequestOutput) -> inference_pb2.GenerateResponse:
        """The message that goes on with the output's choice."""
        _, token_ids, finish_reason, index, num_cached_tokens = output
        choice = self._choices[index]
        response = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            index=index,
            token_ids=token_ids,
            text=choice.text(token_ids, is_last=finish_reason is not None),
            seed=choice.take_seed(),
            finish_reason=common_pb2.FinishReason.Name(finish_reason or 0),
        )
        self._num_output_tokens += len(token_ids)
        self._num_unfinished -= finish_reason is not None
        if not self._num_unfinished:
            response.usage.num_prompt_tokens = self._num_prompt_tokens
            response.usage.num_output_tokens = self._num_output_tokens
            response.usage.num_cached_tokens = num_cached_tokens
        return response


class _Choice:
    def __init__(self, seed: int, detokenizer: Detokenizer | None) -> None:
        self._seed: int | None = seed
        self._detokenizer = detokenizer

    def take_seed(self) -> int | None:
        """The seed once, then None: only the first message tells it."""
        seed, self._seed = self._seed, None
        return seed

    def text(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_ids)
        return text + self._detokenizer.finish() if is_last else text
