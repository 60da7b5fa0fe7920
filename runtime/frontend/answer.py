"""The messages of one request's stream."""

from collections.abc import Iterable, Sequence

from protos import common_pb2, inference_pb2
from runtime.frontend.choice import Choice, Part
from runtime.frontend.text import Tokenizer
from runtime.request import RequestOutput, TokenLogprobs
from runtime.sampling_params import SamplingParams, fork_seed


class Answer:
    """Turns the outputs of a request's choices into messages: text and tokens, usage at the end."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        seed: int,
    ) -> None:
        """`request_id` is the client's label; without a tokenizer messages carry no text."""
        self._request_id = request_id
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._num_output_tokens = 0
        self._num_unfinished = params.n
        self._choices = [Choice(tokenizer, prompt, params) for _ in range(params.n)]
        self._untold_seeds = {index: fork_seed(seed, index) for index in range(params.n)}
        # Of the prompt's tokens, the next whose logprob is to be told.
        self._next_scored = None if params.prompt_logprobs is None else 0

    @property
    def is_complete(self) -> bool:
        return not self._num_unfinished

    def extend(self, output: RequestOutput) -> tuple[inference_pb2.GenerateResponse, bool]:
        """The message that goes on with the output's choice; whether the engine is to end it."""
        index = output.choice
        part = self._choices[index].extend(output)
        response = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            index=index,
            token_ids=part.token_ids,
            text=part.text,
            seed=self._untold_seeds.pop(index, None),
            finish_reason=common_pb2.FinishReason.Name(part.finish_reason or 0),
        )
        self._add_logprobs(response, part, output)
        match part.stop:
            case str():
                response.stop_string = part.stop
            case int():
                response.stop_token_id = part.stop
        self._num_output_tokens += len(part.token_ids)
        self._num_unfinished -= part.finish_reason is not None
        if self.is_complete:
            response.usage.num_prompt_tokens = len(self._prompt)
            response.usage.num_output_tokens = self._num_output_tokens
            response.usage.num_cached_tokens = output.num_cached_tokens
        return response, part.ends_early

    def _add_logprobs(
        self, response: inference_pb2.GenerateResponse, part: Part, output: RequestOutput
    ) -> None:
        pairs = zip(part.token_ids, part.logprobs, strict=False)  # none, where not wanted
        response.logprobs.extend(self._entries(pairs))
        if self._next_scored is None or output.choice:
            return
        if self._next_scored == 0:
            response.prompt_logprobs.append(self._token(self._prompt[0]))
            self._next_scored = 1
        end = self._next_scored + len(output.scores)
        scored = self._prompt[self._next_scored : end]
        response.prompt_logprobs.extend(self._entries(zip(scored, output.scores, strict=True)))
        self._next_scored = end

    def _entries(
        self, pairs: Iterable[tuple[int, TokenLogprobs]]
    ) -> Iterable[inference_pb2.TokenLogprob]:
        for token_id, entry in pairs:
            message = self._token(token_id)
            message.logprob = entry.logprob
            for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                top = self._token(top_id)
                message.top.add(
                    token_id=top_id, text=top.text, token_bytes=top.token_bytes, logprob=logprob
                )
            yield message

    def _token(self, token_id: int) -> inference_pb2.TokenLogprob:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        text = data.decode(errors="replace")
        return inference_pb2.TokenLogprob(token_id=token_id, text=text, token_bytes=data)
