"""What is counted and logged of a request."""

import asyncio
import json
import logging

import pytest

from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FingerprintError,
    InvalidRequestError,
    LockstepError,
    ModelOutputError,
    UnavailableError,
    WorkerError,
)
from runtime.frontend.observer import status_of
from runtime.logs import JsonFormatter
from runtime.request import FinishReason, RequestOutput, Start
from tests.engine_stats import MODEL
from tests.observing import Observed, make_stream

pytestmark = pytest.mark.wire

GENERATE = "/lockstep.v1.Inference/Generate"
OUTPUTS = (
    RequestOutput(0, (5, 6), num_cached_tokens=2, start=Start(queue_s=0.25, prefill_s=0.5)),
    RequestOutput(0, (7,), FinishReason.STOP),
)


def rendered(observed: Observed) -> list[str]:
    return observed.metrics.render({}, MODEL)[0].decode().splitlines()


def test_a_request_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runtime.frontend.observer")
    observed = Observed()
    stream = make_stream(*OUTPUTS, prompt=(1, 2, 3, 4))
    with observed.request(GENERATE, headers={"authorization": "Bearer secret"}) as seen:
        seen.started(stream)
        seen.delivered(0)
        observed.deliver(seen, stream, after_s=1.0)
        observed.deliver(seen, stream, after_s=0.5)
        observed.clock.now += 0.25
        assert not caplog.records
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    del line["time"]
    assert line == {
        "level": "INFO",
        "logger": "runtime.frontend.observer",
        "message": "request ended",
        "request_id": "r1",
        "endpoint": GENERATE,
        "tenant": "acme",
        "status": "ok",
        "num_prompt_tokens": 4,
        "num_output_tokens": 3,
        "queue_s": 0.25,
        "ttft_s": 1.0,
        "duration_s": 1.75,
    }


def test_a_request_that_never_began_has_no_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runtime.frontend.observer")
    with (
        pytest.raises(InvalidRequestError),
        Observed().request(request_id="x" * 1000),
    ):
        raise InvalidRequestError("prompt 'my secret' is empty")
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["status"], line["queue_s"], line["ttft_s"]) == ("invalid", None, None)
    assert line["request_id"] == "x" * 128
    assert "secret" not in json.dumps(line)


def test_a_request_is_counted_when_it_ends() -> None:
    observed = Observed()
    stream = make_stream(*OUTPUTS)
    with observed.request(GENERATE) as seen:
        assert f'lockstep_open_requests{{endpoint="{GENERATE}"}} 1.0' in rendered(observed)
        seen.started(stream)
        observed.deliver(seen, stream, after_s=3.0)
        observed.deliver(seen, stream, after_s=0.0)
        seen.delivered(0)
    lines = rendered(observed)
    assert f'lockstep_open_requests{{endpoint="{GENERATE}"}} 0.0' in lines
    assert f'lockstep_requests_total{{endpoint="{GENERATE}",status="ok"}} 1.0' in lines
    assert f'lockstep_request_duration_seconds_sum{{endpoint="{GENERATE}"}} 3.0' in lines
    assert "lockstep_output_tokens_sent_total 3.0" in lines


def test_prompts_of_one_request_are_summed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runtime.frontend.observer")
    observed = Observed()
    streams = [make_stream(*OUTPUTS), make_stream(*OUTPUTS)]
    with observed.request() as seen:
        for stream in streams:
            seen.started(stream)
        for after_s, stream in enumerate((*streams, *streams)):
            observed.deliver(seen, stream, after_s=after_s)
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (6, 6)
    assert (line["ttft_s"], line["queue_s"], line["duration_s"]) == (0, 0.25, 6)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "ok"),
        (InvalidRequestError("x"), "invalid"),
        (CapacityError("x", retry_after_s=1), "overloaded"),
        (DeadlineError("x"), "deadline"),
        (UnavailableError("x"), "unavailable"),
        (WorkerError("x"), "unavailable"),
        (FingerprintError("x"), "other_model"),
        (ModelOutputError("x"), "model_output"),
        (ConfigError("x"), "not_configured"),
        (LockstepError("x"), "internal"),
        (KeyError("x"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (ConnectionResetError(), "cancelled"),
    ],
)
def test_an_error_says_how_a_request_ended(error: BaseException | None, status: str) -> None:
    assert status_of(error) == status


def test_refused_requests_are_counted_by_reason() -> None:
    observed = Observed()
    for error in (CapacityError("full", retry_after_s=1), InvalidRequestError("bad"), KeyError()):
        with pytest.raises(type(error)), observed.request():
            raise error
    lines = rendered(observed)
    assert 'lockstep_rejections_total{reason="overloaded"} 1.0' in lines
    assert 'lockstep_rejections_total{reason="invalid"} 1.0' in lines
    assert 'lockstep_rejections_total{reason="unavailable"} 0.0' in lines
    assert 'lockstep_rejections_total{reason="other"} 0.0' in lines


def test_what_breaks_after_its_first_token_was_not_refused() -> None:
    observed = Observed()

    def break_off() -> None:
        stream = make_stream(*OUTPUTS)
        with observed.request() as seen:
            seen.started(stream)
            observed.deliver(seen, stream, after_s=1.0)
            raise UnavailableError("the engine is gone")

    with pytest.raises(UnavailableError):
        break_off()
    lines = rendered(observed)
    labels = 'endpoint="/v1/completions",status="unavailable"'
    assert f"lockstep_requests_total{{{labels}}} 1.0" in lines
    assert 'lockstep_rejections_total{reason="unavailable"} 0.0' in lines


def test_a_request_is_logged_by_the_name_in_its_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runtime.frontend.observer")
    with Observed().request() as seen:
        seen.name("x" * 1000)
    (record,) = caplog.records
    assert json.loads(JsonFormatter().format(record))["request_id"] == "x" * 128


def test_a_client_that_leaves_is_counted_as_such() -> None:
    observed = Observed()

    async def leave() -> None:
        with observed.request():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    name = 'lockstep_requests_total{endpoint="/v1/completions",status="cancelled"}'
    assert f"{name} 1.0" in rendered(observed)
