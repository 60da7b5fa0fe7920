"""What a scrape of a frontend gets."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from runtime.frontend.engine_metrics import STEP_PARTS
from runtime.frontend.metrics import FOLDER_VARIABLE, FrontendMetrics
from runtime.histogram import HistogramSnapshot
from tests.engine_stats import MODEL, SNAPSHOT, make_stats

pytestmark = pytest.mark.wire

TIMEOUT_S = 60
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    """Values by name and labels; each is told once."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def rendered(metrics: FrontendMetrics, **engines: object) -> Samples:
    stats = {address: make_stats() if each is None else each for address, each in engines.items()}
    body, content_type = metrics.render(stats, MODEL)
    assert content_type == CONTENT_TYPE_LATEST
    return read(body.decode())


def value_of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"lockstep_{name}", frozenset(labels.items())]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("num_requests_running", "num_running"),
        ("num_requests_waiting", "num_waiting"),
        ("max_num_seqs", "max_num_seqs"),
        ("kv_cache_blocks", "num_blocks"),
        ("kv_cache_reusable_blocks", "num_cached_blocks"),
        ("steps_total", "num_steps"),
        ("scheduled_tokens_total", "num_scheduled_tokens"),
        ("scheduled_sequences_total", "num_scheduled_sequences"),
        ("prompt_tokens_total", "num_prompt_tokens"),
        ("generation_tokens_total", "num_output_tokens"),
        ("prefix_cache_queries_total", "num_prompt_tokens"),
        ("prefix_cache_hits_total", "num_cached_tokens"),
        ("num_preemptions_total", "num_preemptions"),
        ("nan_rows_total", "num_invalid_logits"),
        ("empty_supports_total", "num_empty_supports"),
    ],
)
def test_an_engines_numbers_are_told(name: str, field: str) -> None:
    stats = replace(make_stats(), **{field: 12345})
    assert value_of(rendered(FrontendMetrics(), a=stats), name, engine="a") == 12345


def test_numbers_that_have_a_reason_are_told_by_it() -> None:
    stats = make_stats(
        num_finished_stop=1,
        num_finished_length=2,
        num_finished_abort=3,
        num_refused=4,
        num_timed_out=5,
    )
    samples = rendered(FrontendMetrics(), a=stats)
    success = {
        reason: value_of(samples, "request_success_total", engine="a", finished_reason=reason)
        for reason in ("stop", "length", "abort")
    }
    assert success == {"stop": 1, "length": 2, "abort": 3}
    refused = {
        reason: value_of(samples, "engine_rejections_total", engine="a", reason=reason)
        for reason in ("queue_full", "timed_out")
    }
    assert refused == {"queue_full": 4, "timed_out": 5}


def test_the_cache_in_use_is_a_part_of_its_blocks() -> None:
    stats = make_stats(num_blocks=200, num_free_blocks=50)
    assert (
        value_of(rendered(FrontendMetrics(), a=stats), "kv_cache_usage_ratio", engine="a") == 0.75
    )
    stats = make_stats(num_blocks=0, num_free_blocks=0)
    assert value_of(rendered(FrontendMetrics(), a=stats), "kv_cache_usage_ratio", engine="a") >= 0


def test_the_first_life_of_the_workers_is_no_restart() -> None:
    samples = rendered(FrontendMetrics(), a=make_stats(epoch=1), b=make_stats(epoch=3))
    assert value_of(samples, "worker_restarts_total", engine="a") == 0
    assert value_of(samples, "worker_restarts_total", engine="b") == 2


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("time_to_first_token_seconds", "ttft_s"),
        ("inter_token_latency_seconds", "itl_s"),
        ("e2e_request_latency_seconds", "e2e_s"),
        ("request_queue_time_seconds", "queue_s"),
        ("request_prompt_tokens", "prompt_tokens"),
        ("request_generation_tokens", "output_tokens"),
    ],
)
def test_a_histogram_counts_what_is_below_each_bound(name: str, field: str) -> None:
    snapshot = HistogramSnapshot(bounds=(0.25, 2.0), counts=(3, 1, 2), sum=40.5)
    samples = rendered(FrontendMetrics(), a=replace(make_stats(), **{field: snapshot}))
    buckets = {
        bound: value_of(samples, f"{name}_bucket", engine="a", le=bound)
        for bound in ("0.25", "2.0", "+Inf")
    }
    assert buckets == {"0.25": 3, "2.0": 4, "+Inf": 6}
    assert value_of(samples, f"{name}_count", engine="a") == 6
    assert value_of(samples, f"{name}_sum", engine="a") == 40.5


def test_the_parts_of_a_step_are_told_apart() -> None:
    parts = [part for part, _ in STEP_PARTS]
    step_s = replace(
        make_stats().step_s,
        **{part: replace(SNAPSHOT, sum=float(place)) for place, part in enumerate(parts)},
    )
    samples = rendered(FrontendMetrics(), a=make_stats(step_s=step_s))
    sums = [value_of(samples, "step_seconds_sum", engine="a", part=part) for part in parts]
    assert sums == list(range(7))


def test_engines_are_told_by_their_addresses() -> None:
    samples = rendered(FrontendMetrics(), a=make_stats(num_steps=1), b=make_stats(num_steps=2))
    assert value_of(samples, "steps_total", engine="a") == 1
    assert value_of(samples, "steps_total", engine="b") == 2


def test_without_an_engine_a_frontend_tells_of_itself() -> None:
    samples = rendered(FrontendMetrics())
    assert value_of(samples, "resumed_requests_total") == 0
    assert not any("engine" in dict(labels) for _, labels in samples)


def test_what_is_served_is_told() -> None:
    (labels,) = (labels for name, labels in rendered(FrontendMetrics()) if name == "lockstep_info")
    told = dict(labels)
    assert told.pop("version")
    assert told == {
        "model": "tiny",
        "architecture": "TinyForCausalLM",
        "fingerprint": "abc",
        "tp_size": "2",
    }


def test_what_a_frontend_counts_is_told() -> None:
    metrics = FrontendMetrics()
    metrics.count_resumed()
    metrics.count_reconnect()
    metrics.count_sent(3)
    metrics.count_rejection("unauthorized")
    samples = rendered(metrics)
    assert value_of(samples, "resumed_requests_total") == 1
    assert value_of(samples, "engine_reconnects_total") == 1
    assert value_of(samples, "output_tokens_sent_total") == 3
    assert value_of(samples, "rejections_total", reason="unauthorized") == 1


def test_clients_can_not_make_labels() -> None:
    metrics = FrontendMetrics()
    for number in range(50):
        metrics.count_open(f"/v1/{number}")
        metrics.count_request(f"/v1/{number}", "invalid", 0.5)
        metrics.count_rejection(f"since {number}")
    samples = rendered(metrics)
    assert value_of(samples, "requests_total", endpoint="other", status="invalid") == 50
    assert value_of(samples, "request_duration_seconds_count", endpoint="other") == 50
    assert value_of(samples, "open_requests", endpoint="other") == 0
    assert value_of(samples, "rejections_total", reason="other") == 50
    assert not any("49" in str(labels) for _, labels in samples)


def test_an_engine_that_does_not_answer_is_shown_as_missing() -> None:
    body, _ = FrontendMetrics().render({"b:1": make_stats()}, MODEL, ["a:1", "b:1"])
    samples = read(body.decode())
    assert value_of(samples, "engine_up", engine="a:1") == 0
    assert value_of(samples, "engine_up", engine="b:1") == 1
    assert ("lockstep_steps_total", frozenset({("engine", "a:1")})) not in samples


def test_frontends_in_one_process_count_apart() -> None:
    first, second = FrontendMetrics(), FrontendMetrics()
    first.count_resumed()
    assert value_of(rendered(first), "resumed_requests_total") == 1
    assert value_of(rendered(second), "resumed_requests_total") == 0


CHILD = """
import json
import sys

from runtime.frontend.metrics import FrontendMetrics
from tests.engine_stats import MODEL

metrics = FrontendMetrics()
metrics.count_open("/tokenize")
metrics.count_open("/tokenize")
metrics.count_request("/tokenize", "ok", 0.03)
metrics.count_sent(5)
print("ready", flush=True)
for line in sys.stdin:
    body, _ = metrics.render({}, MODEL)
    print(json.dumps(body.decode()), flush=True)
"""


class Frontend:
    """A process of its own that counts two requests, one of which is open still."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {FOLDER_VARIABLE: str(folder)},
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def scrape(self) -> Samples:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return read(json.loads(self._process.stdout.readline()))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)

    def leave_a_zombie(self) -> None:
        """Kills it, and doesn't ask for its end."""
        self._process.kill()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def frontends(folder: Path) -> Iterator[tuple[Frontend, Frontend]]:
    with Frontend(folder) as first, Frontend(folder) as second:
        yield first, second


def test_any_of_the_frontends_that_share_a_port_tells_the_sums_of_all(tmp_path: Path) -> None:
    with frontends(tmp_path) as (first, second):
        samples = first.scrape()
        assert samples == second.scrape()
    assert value_of(samples, "open_requests", endpoint="/tokenize") == 2
    assert value_of(samples, "requests_total", endpoint="/tokenize", status="ok") == 2
    assert value_of(samples, "output_tokens_sent_total") == 10
    assert value_of(samples, "request_duration_seconds_count", endpoint="/tokenize") == 2
    bucket = value_of(samples, "request_duration_seconds_bucket", endpoint="/tokenize", le="0.05")
    assert bucket == 2
    (info,) = (value for (name, _), value in samples.items() if name == "lockstep_info")
    assert info == 1


@pytest.mark.parametrize("is_reaped", [True, False])
def test_what_a_dead_frontend_counted_stays_and_what_it_had_open_goes(
    tmp_path: Path, is_reaped: bool
) -> None:
    with frontends(tmp_path) as (first, second):
        assert value_of(first.scrape(), "open_requests", endpoint="/tokenize") == 2
        if is_reaped:
            second.kill()
        else:
            second.leave_a_zombie()
        samples = first.scrape()
    assert value_of(samples, "open_requests", endpoint="/tokenize") == 1
    assert value_of(samples, "requests_total", endpoint="/tokenize", status="ok") == 2
    assert value_of(samples, "output_tokens_sent_total") == 10


def test_the_same_is_told_with_and_without_a_folder(tmp_path: Path) -> None:
    metrics = FrontendMetrics()
    metrics.count_open("/tokenize")
    metrics.count_open("/tokenize")
    metrics.count_request("/tokenize", "ok", 0.03)
    metrics.count_sent(5)
    with Frontend(tmp_path) as frontend:
        shared = frontend.scrape()
    alone = read(metrics.render({}, MODEL)[0].decode())
    assert shared == alone
