"""Offline generation: the engine in this process, without frontends."""

import atexit
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tqdm import tqdm

from runtime.config import EngineConfig
from runtime.driver import running_engine
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.frontend.text import Detokenizer, Tokenizer
from runtime.request import EngineStats, FinishReason, Request, RequestFailure, RequestOutput
from runtime.sampling_params import SamplingParams, fork_seed

if TYPE_CHECKING:
    from runtime.live_requests import Outputs

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step brought: text that became certain, and tokens."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice of a prompt's answer; its seed reproduces it, with n=1 too."""

    prompt_token_ids: tuple[int, ...]
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache


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
        choice. `params` is for all prompts, or one for each.
        Raises InvalidRequestError, which names the prompt, before anything runs.
        Raises UnavailableError: the engine has ended. Raises CapacityError: the prompts are more
        than the limits of its queue.
        """
        requests = self._make_requests([prompts] if isinstance(prompts, str) else prompts, params)
        choices = [(each.request_id, i) for each in requests for i in range(each.params.n)]
        tokens: dict[tuple[int, int], list[int]] = {choice: [] for choice in choices}
        ends: dict[tuple[int, int], RequestOutput] = {}
        room = sum(request.params.n * request.params.max_tokens for request in requests)
        with tqdm(total=room, disable=not progress, file=sys.stderr, unit="token") as bar:
            for output in self._run(requests):
                request_id, choice = output.request_id, (output.request_id, output.choice)
                tokens[choice].extend(output.token_ids)
                if output.finish_reason is not None:
                    ends[choice] = output
                    # An early end leaves fewer tokens to wait for.
                    bar.total -= requests[request_id].params.max_tokens - len(tokens[choice])
                bar.update(len(output.token_ids))
        return [
            self._completion(requests[choice[0]], tokens[choice], ends[choice])
            for choice in choices
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continues one prompt, step by step. Closing the iterator ends the request.

        Raises what `generate` does, and InvalidRequestError where n is more than 1.
        """
        (request,) = self._make_requests([prompt], params)
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n={request.params.n} must be 1: a stream has one choice; generate takes more"
            )
        detokenizer = self._detokenizer(request)
        for output in self._run([request]):
            text = ""
            if detokenizer is not None:
                text = detokenizer.push(output.token_ids)
                if output.finish_reason is not None:
                    text += detokenizer.finish()
            yield Chunk(text=text, token_ids=output.token_ids, finish_reason=output.finish_reason)

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
        requests = []
        for place, (prompt, its_params) in enumerate(zip(prompts, each, strict=True)):
            try:
                request = Request(
                    request_id=place,
                    prompt_token_ids=self._tokenize(prompt),
                    params=its_params,
                    seed=secrets.randbits(64) if its_params.seed is None else its_params.seed,
                )
                request.check(self._engine.model)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompts[{place}]: {error}") from error
            requests.append(request)
        return requests

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

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        """None where the model has no tokenizer: its outputs have no text."""
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, request.prompt_token_ids)

    def _completion(
        self, request: Request, token_ids: Sequence[int], end: RequestOutput
    ) -> Completion:
        assert end.finish_reason is not None
        detokenizer = self._detokenizer(request)
        return Completion(
            prompt_token_ids=tuple(request.prompt_token_ids),
            index=end.choice,
            token_ids=tuple(token_ids),
            text="" if detokenizer is None else detokenizer.push(token_ids) + detokenizer.finish(),
            finish_reason=end.finish_reason,
            seed=fork_seed(request.seed, end.choice),
            num_cached_tokens=end.num_cached_tokens,
        )

    def _run(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        if self._closed:
            raise UnavailableError("this LLM is closed")
        inbox: SimpleQueue[Outputs] = SimpleQueue()
        connection = self._engine.connect(inbox.put)
        try:
            for request in requests:
                connection.add(request)
            unfinished = sum(request.params.n for request in requests)
            while unfinished:
                for output in inbox.get():
                    if isinstance(output, RequestFailure):
                        raise output.error
                    unfinished -= output.finish_reason is not None
                    yield output
        finally:
            connection.close()
