"""Offline generation: the engine in this process, without frontends."""

import atexit
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import index
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tqdm import tqdm

from runtime.completion import Chunk, Completion, Draft
from runtime.config import EngineConfig
from runtime.driver import running_engine
from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from runtime.frontend.choice import Choice, Part
from runtime.frontend.prompts import check_texts, encode_bad_words
from runtime.frontend.text import Tokenizer
from runtime.request import (
    EngineStats,
    Request,
    RequestFailure,
    RequestOutput,
)
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.live_requests import Outputs

Prompt = str | Sequence[int]


class LLM:
    """A model and its engine. Close it, or use it as a context manager.

    Raises ConfigError: the model or the options can't be served.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tp: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        launcher: Literal["ray", "local"] = "local",
        progress: bool = True,
    ) -> None:
        """Starts workers and engine; `from_config` takes every option."""
        config = EngineConfig(model=model, tp=tp, device=device, dtype=dtype, launcher=launcher)
        self._start(config, progress=progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool = True) -> Self:
        llm = cls.__new__(cls)
        llm._start(config, progress=progress)
        return llm

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continues all prompts, texts or token ids, in one batch.

        Answers in their order, prompt by prompt; with n > 1 each has n completions, choice by
        choice. `params` is for all prompts, or one for each; what it leaves unset takes the model's
        defaults.
        Raises InvalidRequestError, which names the prompt, before anything runs.
        Raises UnavailableError: the engine has ended. Raises CapacityError: the prompts are more
        than the limits of its queue. What fails one prompt alone is its completions' `error`: a
        structure that is refused, parameters that leave no token, logits that are no numbers.
        """
        requests = self._make_requests([prompts] if isinstance(prompts, str) else prompts, params)
        drafts = {
            (each.request_id, index): Draft(each, index)
            for each in requests
            for index in range(each.params.n)
        }
        room = sum(request.params.n * request.params.max_tokens for request in requests)
        with tqdm(total=room, disable=not progress, file=sys.stderr, unit="token") as bar:
            for brought in self._run(requests):
                if isinstance(brought, RequestFailure):
                    for index in range(requests[brought.request_id].params.n):
                        drafts[brought.request_id, index].error = brought.error
                    continue
                output, part = brought
                draft = drafts[output.request_id, output.choice]
                draft.extend(output, part)
                if part.finish_reason is not None:
                    # An early end leaves fewer tokens to wait for.
                    bar.total -= draft.request.params.max_tokens - len(draft.token_ids)
                bar.update(len(part.token_ids))
        return [draft.completion() for draft in drafts.values()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continues one prompt, step by step. Closing the iterator ends the request.

        Raises what `generate` does, and InvalidRequestError where n is more than 1.
        """
        (request,) = self._make_requests([prompt], params)
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n={request.params.n} must be 1: a stream has one choice; generate takes more"
            )
        for brought in self._run([request]):
            if isinstance(brought, RequestFailure):
                raise brought.error
            _, part = brought
            yield Chunk(
                text=part.text,
                token_ids=part.token_ids,
                finish_reason=part.finish_reason,
                stop=part.stop,
                logprobs=part.logprobs,
            )

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Ends engine and workers; may be called twice."""
        self._closed = True
        atexit.unregister(self.close)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, config: EngineConfig, *, progress: bool) -> None:
        self._closed = False
        with ExitStack() as starting:
            self._engine = starting.enter_context(running_engine(config, quiet=not progress))
            self._tokenizer = Tokenizer.load(self._engine.model.path)
            self._closing = starting.pop_all()
        # While threads and gRPC still work, which at the interpreter's end they don't.
        atexit.register(self.close)

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if params is not None and not isinstance(params, SamplingParams | Sequence):
            raise InvalidRequestError(
                f"params is of type {type(params).__name__}: must be SamplingParams, or a list "
                "with one for each prompt"
            )
        each = (
            [params or SamplingParams()] * len(prompts)
            if not isinstance(params, Sequence)
            else params
        )
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"params has {len(each)} entries for {len(prompts)} prompts: give one, or one each"
            )
        model = self._engine.model
        requests = []
        for place, (prompt, its_params) in enumerate(zip(prompts, each, strict=True)):
            try:
                token_ids = self._tokenize(prompt)
                request = Request(
                    request_id=place,
                    prompt_token_ids=token_ids,
                    params=model.complete(its_params, num_prompt_tokens=len(token_ids)),
                    seed=secrets.randbits(64) if its_params.seed is None else its_params.seed,
                    bad_words=self._bad_words(its_params),
                )
                request.check(model)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompts[{place}]: {error}") from error
            requests.append(request)
        return requests

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        check_texts(params, self._tokenizer)
        if self._tokenizer is None:
            return ()
        return encode_bad_words(self._tokenizer, params.bad_words)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt]
            except TypeError as error:
                raise InvalidRequestError(
                    f"prompt is neither a text nor a list of token ids: {error}"
                ) from error
        if not prompt:
            raise InvalidRequestError("prompt is empty: it must have at least 1 character")
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt is a text, and the model folder has no tokenizer.json: give token ids"
            )
        return self._tokenizer.encode(prompt)

    def _run(
        self, requests: Sequence[Request]
    ) -> Iterator[tuple[RequestOutput, Part] | RequestFailure]:
        """What the engine brings, and how it reads, until all choices have ended or failed.

        Raises UnavailableError and CapacityError, which concern all that are left.
        """
        if self._closed:
            raise UnavailableError("this LLM is closed")
        choices = {
            (each.request_id, index): Choice(self._tokenizer, each.prompt_token_ids, each.params)
            for each in requests
            for index in range(each.params.n)
        }
        inbox: SimpleQueue[Outputs] = SimpleQueue()
        connection = self._engine.connect(inbox.put)
        try:
            for request in requests:
                connection.add(request)
            while choices:
                for output in inbox.get():
                    if isinstance(output, RequestFailure):
                        if isinstance(output.error, UnavailableError | CapacityError):
                            raise output.error
                        choices = {
                            key: choice
                            for key, choice in choices.items()
                            if key[0] != output.request_id
                        }
                        yield output
                        continue
                    key = output.request_id, output.choice
                    if key not in choices:  # it was ended while this was under way
                        continue
                    part = choices[key].extend(output)
                    if part.finish_reason is not None:
                        del choices[key]
                    if part.ends_early:
                        connection.abort(*key)
                    yield output, part
        finally:
            connection.close()
