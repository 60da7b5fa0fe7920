"""Engines over the oracle that are recorded, and their recordings."""

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from protos.recording_pb2 import Record
from runtime.engine import Engine
from runtime.recording.encoder import Origin
from runtime.recording.reader import Recording, open_recording
from runtime.recording.recorder import RecordedExecutor, RecordedScheduler, Recorder
from runtime.recording.setup import SchedulerSetup
from runtime.recording.writer import RecordWriter
from runtime.request import Request
from runtime.scheduling.limits import QueueLimits, SchedulerLimits
from runtime.structured import Compiler, NoCompiler
from tests.params import complete_params
from tests.scheduling import EOS, VOCAB_SIZE, OracleExecutor, make_layout
from tests.served import ScoringOracle, oracle_model

STEP_S = 0.01
MAX_BYTES = 64 << 20
MAX_STEPS = 5000
TIMEOUT_S = 30


def make_setup(
    *,
    num_blocks: int = 40,
    windows: tuple[int, ...] = (0,),
    policy: str = "fcfs",
    queue: QueueLimits | None = None,
) -> SchedulerSetup:
    layout = make_layout(num_blocks=num_blocks, windows=windows, max_chunk_tokens=24)
    return SchedulerSetup(
        layout=layout,
        limits=SchedulerLimits(
            max_num_batched_tokens=24,
            max_chunk_tokens=24,
            max_num_seqs=6,
            max_model_len=layout.max_sequence_tokens,
            max_num_partial_prefills=2,
            queue=queue or QueueLimits(),
        ),
        policy=policy,
        priority_ageing_s=1.0,
        prefix_cache=True,
        root=b"secret of the process",
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
    )


def make_origin(setup: SchedulerSetup, **changes: Any) -> Origin:
    origin = Origin(
        run="run",
        setup=setup,
        model="oracle",
        fingerprint="f00d",
        depth=2,
        options={"policy": setup.policy},
        unix_s=1e9,
        clock_s=100.0,
    )
    return replace(origin, **changes)


class RecordedEngine:
    """An engine whose steps a test makes; time passes by the step. Close it to read."""

    def __init__(
        self,
        folder: Path,
        executor_class: type[OracleExecutor] = ScoringOracle,
        *,
        setup: SchedulerSetup | None = None,
        depth: int = 2,
        compiler: Compiler | None = None,
        max_bytes: int = MAX_BYTES,
        **origin: Any,
    ) -> None:
        self.now = 100.0
        self.setup = setup or make_setup()
        self.recorder = Recorder(
            folder,
            make_origin(self.setup, depth=depth, **origin),
            max_bytes=max_bytes,
            clock=lambda: self.now,
        )
        self.scheduler = RecordedScheduler(self.setup.parts(), self.recorder)
        self.ranks = executor_class(self.setup.layout)
        self.engine = Engine(
            model=oracle_model(self.scheduler),
            scheduler=self.scheduler,
            executor=RecordedExecutor(self.ranks, self.recorder),
            compiler=compiler or NoCompiler("a test has no tokenizer"),
            depth=depth,
            clock=lambda: self.now,
            on_idle=lambda: self.recorder.idle(self.scheduler),
        )
        self.num_steps = 0
        self.connection = self.engine.connect(lambda outputs: None)

    def add(self, request_id: int, prompt: list[int], **fields: Any) -> None:
        params = complete_params(max_tokens=8, **fields.pop("params", {}))
        request = Request(
            request_id=request_id, prompt_token_ids=prompt, params=params, seed=request_id, **fields
        )
        self.engine.add(self.connection, request, arrived_s=self.now)

    def step(self) -> None:
        self.engine.step()
        self.now += STEP_S

    def idle(self) -> None:
        """Nothing has run for a second."""
        settle(self.recorder._writer)
        self.engine._on_idle()

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no progress")


def settle(writer: RecordWriter) -> None:
    """Until what was put is written."""
    written = threading.Event()

    def make() -> list[Record]:
        written.set()
        return []

    writer.put(make)
    assert written.wait(TIMEOUT_S)


def live_at_random(engine: RecordedEngine, seed: int, *, num_requests: int = 60) -> None:
    """Requests of all kinds come, are aborted and preempted, until all have ended."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(1, VOCAB_SIZE) for _ in range(20)] for _ in range(3)]
    request_id = 0
    while request_id < num_requests or engine.engine.has_work:
        if request_id < num_requests and draw.random() < 0.5:
            request_id += 1
            prompt = draw.choice(prefixes)[: draw.randrange(1, 20)]
            prompt += [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randrange(1, 30))]
            engine.add(request_id, prompt, **_random_fields(draw))
        if draw.random() < 0.1:
            engine.engine.abort(engine.connection, draw.randrange(1, num_requests + 1))
        if draw.random() < 0.05:
            engine.engine.abort(engine.connection, draw.randrange(1, num_requests + 1), 0)
        if engine.engine.has_work:
            engine.step()


def _random_fields(draw: random.Random) -> dict[str, Any]:
    params = draw.choice(
        [
            {},
            {"n": 3},
            {"repetition_penalty": 1.2},
            {"presence_penalty": 0.5, "logit_bias": {3: 1.5, 4: -2.25}},
            {"min_tokens": 4, "stop_token_ids": (5, 6, 7)},
            {"prompt_logprobs": 0},
            {"logprobs": 2, "ignore_eos": True},
            {"bad_words": ("ab",)},
        ]
    )
    return {
        "params": params,
        "priority": draw.randrange(-2, 3),
        "tenant": draw.choice(["a", "b", ""]),
        "cache_salt": draw.choice(["", "", "salt"]),
        "timeout_s": draw.choice([None, None, 0.05, 1.0]),
        "bad_words": ((1, 2), (3,)) if "bad_words" in params else (),
    }


def read(folder: Path) -> Recording:
    return open_recording(folder)


def records_of(folder: Path, kind: str) -> list[Record]:
    records = open_recording(folder).records()
    return [each for each in records if each.WhichOneof("record") == kind]
