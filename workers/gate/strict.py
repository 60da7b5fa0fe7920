"""The strict test: a random checkpoint's logits and tokens, ours against transformers' own.

Logits of forced random tokens are compared, since equal tokens alone prove little: small random
models repeat themselves. Three sequences share their steps, one of them 50 times as long as
another, in chunks and token by token: so the test also shows whether one of them moves another.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from workers.config import WorkerConfig
from workers.gate.errors import NoReference
from workers.gate.feeder import Feeder
from workers.model_executor import ModelExecutor
from workers.models.config import TRANSFORMERS_ERRORS, find_whole_class
from workers.parallel import join, open_rendezvous
from workers.serial_thread import SerialThread

BOUND = 1e-4  # of the logits' standard deviation
NEW_TOKENS = 12
# Tokens that each sequence is fed in each step.
CHUNKS = (
    (90, 7, 120, 1, 1, 60, 21),
    (0, 5, 6, 1, 1, 1, 10),
    (0, 0, 3, 1, 1, 1, 0),
)
LONGEST = sum(CHUNKS[0])
MAX_TOKENS = sum(map(sum, CHUNKS)) + len(CHUNKS) * NEW_TOKENS

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What transformers computes, one entry a sequence."""

    texts: list[list[int]]  # random tokens
    logits: list[torch.Tensor]  # [len(text), V], of one forward pass without a cache
    greedy: list[list[int]]  # what `generate` continues the text with


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What ranks made of it."""

    error: float  # largest difference of logits, in standard deviations of the expected ones
    greedy_equal: bool
    parameter_bytes: int  # of the rank that holds most
    kv_heads: tuple[int, ...]  # of one rank, by attention call


def save_random(config: PreTrainedConfig, folder: Path, *, seed: int) -> PreTrainedModel:
    """Saves a checkpoint whose every parameter matters; returns the model, its attention eager.

    Raises NoReference: transformers can't do it. Raises OSError: the folder can't be written.
    """
    generator = torch.Generator().manual_seed(seed)
    try:
        model: PreTrainedModel = find_whole_class(config)._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        model.train(False)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                noise *= min(0.25, max(parameter.shape[-1:], default=1) ** -0.5)
                # Vectors are norms and biases: kept near what they are, but all different.
                parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
        model.save_pretrained(folder)
    except TRANSFORMERS_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not the model's
        raise NoReference(f"transformers can't make a small copy of it: {error}") from error
    return model


@torch.inference_mode()
def expect(model: PreTrainedModel, *, seed: int) -> Expected:
    """What `model`, in evaluation mode, computes for random texts.

    Raises NoReference: it doesn't run.
    """
    draw = random.Random(seed)
    counts = "position_ids" in inspect.signature(model.forward).parameters
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    texts = [[draw.randrange(vocab_size) for _ in range(sum(row))] for row in CHUNKS]
    logits, greedy = [], []
    try:
        for text in texts:
            ids = torch.tensor([text])
            # As `generate` counts them; some classes count otherwise by themselves.
            positions = {"position_ids": torch.arange(len(text)).unsqueeze(0)} if counts else {}
            logits.append(model(input_ids=ids, use_cache=False, **positions).logits[0].clone())
            continued = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
                eos_token_id=None,
            )
            greedy.append(continued[0, len(text) :].tolist())
    except TRANSFORMERS_ERRORS as error:
        raise NoReference(f"a small copy of it doesn't run in transformers: {error}") from error
    return Expected(texts=texts, logits=logits, greedy=greedy)


@torch.inference_mode()
def rounding(model: PreTrainedModel, expected: Expected) -> float:
    """How far transformers' own float32 logits are from its float64 ones; makes `model` float64.

    0 where it doesn't run in float64.
    """
    text, logits = expected.texts[0], expected.logits[0]
    try:
        exact = model.double()(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    except TRANSFORMERS_ERRORS:
        return 0.0
    return _error(exact, logits)


def compare(
    folder: Path, expected: Callable[[], Expected], tp: int, *, loses_blocks: bool = False
) -> Finding:
    """Runs a checkpoint on `tp` ranks, as threads of this process.

    `expected` is asked when the ranks have loaded: what they refuse needs no computing.
    `loses_blocks` makes it wrong on purpose. Raises ModelError: it isn't served so.
    """
    with _ranks(folder, tp) as ranks:
        wanted = expected()
        spec = ranks.executors[0].spec
        feeder = Feeder(spec, max_tokens=MAX_TOKENS, loses_blocks=loses_blocks)
        ranks.call(lambda executor: executor.allocate_cache(feeder.layout))
        forced = _forced_logits(ranks, feeder, wanted.texts)
        predicted = _predictions(ranks, feeder, forced, wanted.greedy)
        return Finding(
            error=max(map(_error, forced, wanted.logits)),
            greedy_equal=predicted == wanted.greedy,
            parameter_bytes=max(each.spec.parameter_bytes for each in ranks.executors),
            kv_heads=tuple(layer.num_kv_heads for layer in spec.layers),
        )


class _Ranks:
    """The ranks of one model; every call runs on all of them at once, each on its own thread."""

    def __init__(self, threads: Sequence[SerialThread]) -> None:
        self.executors: list[ModelExecutor] = []
        self._threads = threads

    def on_all(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """What each rank's task returns. The first that fails ends the wait for the others."""
        futures: list[Future[Result]] = [
            thread.submit(task) for thread, task in zip(self._threads, tasks, strict=True)
        ]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]

    def call(self, task: Callable[[ModelExecutor], Result]) -> list[Result]:
        return self.on_all([partial(task, executor) for executor in self.executors])

    def logits(
        self, feeder: Feeder, parts: Sequence[tuple[int, Sequence[int]]]
    ) -> list[torch.Tensor]:
        """Those of each part's tokens, from the sampler's rank."""
        batch = feeder.batch(parts)
        first, *_ = self.call(lambda executor: executor.compute_logits(batch))
        assert first is not None, "the first rank samples"
        return list(torch.split(first, [len(tokens) for _, tokens in parts]))


@contextmanager
def _ranks(folder: Path, tp: int) -> Iterator[_Ranks]:
    """Loads the ranks. After a failure they may wait for each other for ever: nobody joins them."""
    store, port = open_rendezvous(tp, "127.0.0.1") if tp > 1 else (None, 0)
    configs = [
        WorkerConfig(
            model_path=str(folder),
            rank=rank,
            tp_size=tp,
            rendezvous_host="127.0.0.1",
            rendezvous_port=port,
            num_threads=1,
        )
        for rank in range(tp)
    ]
    ranks = _Ranks([SerialThread(f"rank-{rank}") for rank in range(tp)])
    groups = ranks.on_all([partial(join, config, None) for config in configs])
    ranks.executors = ranks.on_all(
        [
            partial(ModelExecutor, config, group, lambda *_: None)
            for config, group in zip(configs, groups, strict=True)
        ]
    )
    yield ranks
    ranks.on_all([group.close for group in groups])
    del store  # kept until here: the ranks met at it


def _forced_logits(
    ranks: _Ranks, feeder: Feeder, texts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    pieces: list[list[torch.Tensor]] = [[] for _ in texts]
    fed = [0] * len(texts)
    for step in zip(*CHUNKS, strict=True):
        parts = []
        for number, count in enumerate(step):
            if count:
                parts.append((number, texts[number][fed[number] : fed[number] + count]))
                fed[number] += count
        for (number, _), piece in zip(parts, ranks.logits(feeder, parts), strict=True):
            pieces[number].append(piece)
    return [torch.cat(each) for each in pieces]


def _predictions(
    ranks: _Ranks,
    feeder: Feeder,
    forced: Sequence[torch.Tensor],
    greedy: Sequence[Sequence[int]],
) -> list[list[int]]:
    """What follows each text and each beginning of its continuation.

    Equals `greedy` where that is what we would generate.
    """
    predicted = [[int(logits[-1].argmax())] for logits in forced]
    for place in range(NEW_TOKENS - 1):
        parts = [(number, [tokens[place]]) for number, tokens in enumerate(greedy)]
        for number, logits in enumerate(ranks.logits(feeder, parts)):
            predicted[number].append(int(logits[-1].argmax()))
    return predicted


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Infinite where a logit is no number."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected[:, : found.shape[1]]).abs().max() / expected.std())
