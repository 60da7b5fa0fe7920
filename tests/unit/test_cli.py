"""Options and TOML files, without starting anything."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from runtime.cli import cli
from runtime.commands.common import ByteSize, config_option, options_of, pick
from runtime.config import EngineConfig
from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig, ServeConfig
from runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

STATIC = {"launcher": "static", "tp": 2}
WORKER_TOKEN = "LOCKSTEP_WORKER_TOKEN"


def parse(*arguments: str) -> EngineConfig:
    """Runs a command that takes every option of EngineConfig and returns what it was given."""
    configs: list[EngineConfig] = []

    @click.command()
    @config_option
    @options_of(EngineConfig)
    def command(**values: object) -> None:
        configs.append(pick(EngineConfig, values))

    result = CliRunner().invoke(command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return configs[0]


def test_every_field_is_an_option_of_serve() -> None:
    options = [each.name for each in cli.commands["serve"].params]
    for config in (EngineConfig, FrontendConfig, ServeConfig):
        assert {field.name for field in dataclasses.fields(config)} <= set(options)
    assert len(options) == len(set(options))


def test_help_is_quick_as_it_imports_nothing_heavy() -> None:
    program = """
import sys
from runtime.cli import cli
cli.main(["--help"], standalone_mode=False)
heavy = {"fastapi", "prometheus_client", "ray", "tokenizers", "torch", "uvicorn"}
sys.exit(", ".join(heavy & sys.modules.keys()) or None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"serve", "frontend", "generate"} <= set(done.stdout.split())


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse() == EngineConfig()


def test_flags() -> None:
    config = parse("--tp", "2", "--launcher", "local", "--kv-memory", "2GiB", "--check-ranks")
    assert config == EngineConfig(tp=2, launcher="local", kv_memory=2 << 30, check_ranks=True)


def test_flags_of_the_scheduler() -> None:
    config = parse(
        *("--policy", "fair", "--no-prefix-cache", "--priority-ageing-s", "2.5"),
        *("--max-num-partial-prefills", "4", "--long-prefill-token-threshold", "128"),
        *("--max-queued-requests", "10", "--max-queued-tokens", "1000", "--queue-timeout-s", "60"),
    )
    assert config == EngineConfig(
        policy="fair",
        prefix_cache=False,
        priority_ageing_s=2.5,
        max_num_partial_prefills=4,
        long_prefill_token_threshold=128,
        max_queued_requests=10,
        max_queued_tokens=1000,
        queue_timeout_s=60.0,
    )


def test_the_models_own_defaults_can_be_ignored() -> None:
    assert parse().generation_config == "auto"
    assert parse("--generation-config", "ignore").generation_config == "ignore"
    result = CliRunner().invoke(cli, ["serve", "--generation-config", "vllm"])
    assert result.exit_code == 2
    assert "'vllm' is not one of 'auto', 'ignore'" in result.output


def test_an_unknown_policy_is_refused() -> None:
    result = CliRunner().invoke(cli, ["serve", "--policy", "lifo"])
    assert result.exit_code == 2
    assert "'lifo' is not one of 'fcfs', 'priority', 'fair'" in result.output


@pytest.mark.parametrize("flag", ["--n=2", "--logprobs=1", "--prompt-logprobs=1"])
def test_generate_has_no_option_for_what_it_would_not_show(flag: str) -> None:
    result = CliRunner().invoke(cli, ["generate", "a prompt", flag])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_help_tells_whose_default_a_parameter_takes() -> None:
    text = " ".join(CliRunner().invoke(cli, ["generate", "--help"]).output.split())
    for option, own in [("max-tokens INTEGER", 16), ("temperature FLOAT", 1), ("top-k INTEGER", 0)]:
        assert re.search(rf"--{option}[^-]* The model's default where unset, or else {own}\.", text)


def test_parameters_that_are_lists_are_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []

    class FakeLLM:
        @classmethod
        @contextmanager
        def from_config(cls, config: EngineConfig) -> Iterator["FakeLLM"]:
            yield cls()

        def stream(self, prompt: str, params: SamplingParams) -> list[object]:
            asked.append(params)
            return []

    monkeypatch.setattr("runtime.llm.LLM", FakeLLM)
    flags = [
        "--stop=a",
        "--stop=b",
        "--stop-token-ids=3",
        "--logit-bias=5=-1.5",
        "--logit-bias=6=2",
    ]
    result = CliRunner().invoke(cli, ["generate", "a prompt", *flags])
    assert result.exit_code == 0, result.output
    (params,) = asked
    # What isn't given is left to the model.
    assert params == SamplingParams(
        stop=("a", "b"), stop_token_ids=(3,), logit_bias={5: -1.5, 6: 2.0}
    )
    wrong = CliRunner().invoke(cli, ["generate", "a prompt", "--logit-bias=5"])
    assert "'5' isn't a token id and a number such as 42=-1.5" in wrong.output


def test_a_frontend_without_any_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_TOKEN", "token")
    monkeypatch.delenv("LOCKSTEP_API_KEY", raising=False)
    result = CliRunner().invoke(cli, ["frontend", "--engine", "127.0.0.1:1"])
    assert isinstance(result.exception, ConfigError)
    assert "neither api_key nor api_keys is set" in str(result.exception)


def test_toml_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('tp = 4\nkv_memory = "512MiB"\nmax_num_seqs = 8\n')
    config = parse("--config", str(path), "--tp", "2")
    assert config == EngineConfig(tp=2, kv_memory=512 << 20, max_num_seqs=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp = 4", r"unknown key 'tpp', do you mean 'tp'\?; keys are"),
        ("max-num-seqs = 4", "unknown key 'max-num-seqs', do you mean 'max_num_seqs'"),
        ("temperature = 1", "unknown key 'temperature'; keys are"),
        ("tp = ", "config.toml"),
        ("config = 1", "unknown key"),
        ("tp = 1.5", "tp=1.5 must be integer"),
        ("tp = true", "tp=True must be integer"),
        ("tp = [1, 2]", r"tp=\[1, 2\] must be integer"),
        ("model = 3", "model=3 must be text"),
        ("check_ranks = 1", "check_ranks=1 must be boolean"),
        ("step_timeout_s = true", "step_timeout_s=True must be float"),
        ("kv_memory = 1.5", "kv_memory=1.5 must be size"),
    ],
)
def test_a_wrong_toml_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(path))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("3MIB", 3 << 20), ("1tb", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "two", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="isn't a size"):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens=8 .*=9"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"kv_memory": 0}, "kv_memory=0 must be at least 1"),
        ({"threads_per_rank": -1}, "threads_per_rank=-1"),
        ({"threads_per_rank": 10**6}, r"threads_per_rank=1000000 must be in \[0, 1024\]"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s=inf must be in"),
        ({"watermark": 1.0}, "watermark=1.0 must be in"),
        ({"ray_address": "h:1", "launcher": "local"}, "ray_address=h:1 needs launcher=ray"),
        ({"workers": "h:1", "launcher": "local"}, "workers=h:1 needs launcher=static"),
        ({"launcher": "static"}, "launcher=static needs workers"),
        (STATIC | {"standby": True}, "standby is set, but launcher=static has no spare workers"),
        ({"standby": True}, "standby is set, but launcher=ray has no spare workers"),
        (STATIC | {"workers": "h:1"}, "workers=h:1 must be as many as ranks: they are 1, tp=2"),
        (STATIC | {"workers": "h:1,h"}, "workers='h' must be HOST:PORT"),
        (STATIC | {"workers": "h:1,h:65536"}, r"workers='h:65536' .* with a port in \[1, 65535\]"),
        (STATIC | {"workers": "h:1, h:1"}, "workers='h:1, h:1' has h:1 twice"),
        ({"placement": "spread", "launcher": "local"}, "placement=spread needs launcher=ray"),
        (
            {"max_num_seqs": 65537, "max_num_batched_tokens": 65537},
            "max_num_seqs=65537 must be at most 65536",
        ),
        ({"step_timeout_s": 0}, r"step_timeout_s=0 must be in \(0, 604800\]"),
        ({"startup_timeout_s": float("nan")}, "startup_timeout_s=nan must be in"),
        (
            {"max_num_partial_prefills": 0},
            "max_num_partial_prefills=0 must be at least 1 and at most max_num_seqs=64",
        ),
        (
            {"max_num_partial_prefills": 9, "max_num_seqs": 8},
            "max_num_partial_prefills=9 must be at least 1 and at most max_num_seqs=8",
        ),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold=0 must be at least 1"),
        ({"priority_ageing_s": 0}, r"priority_ageing_s=0 must be in \(0, 604800\]"),
        ({"priority_ageing_s": float("inf")}, r"priority_ageing_s=inf must be in \(0, 604800\]"),
        ({"priority_ageing_s": float("nan")}, r"priority_ageing_s=nan must be in \(0, 604800\]"),
        ({"max_queued_requests": 0}, "max_queued_requests=0 must be at least 1"),
        ({"max_queued_tokens": 0}, "max_queued_tokens=0 must be at least 1"),
        ({"queue_timeout_s": 0}, r"queue_timeout_s=0 must be in \(0, 604800\]"),
        ({"queue_timeout_s": float("inf")}, "queue_timeout_s=inf must be in"),
        ({"record": ""}, "record is empty"),
        ({"record_steps": True}, "record_steps is set without record"),
        ({"record_redact": True}, "record_redact is set without record"),
        (
            {"record": "x", "record_steps": True, "record_redact": True},
            "record_steps and record_redact are set: steps are made of token ids",
        ),
        ({"record_max_bytes": 5}, "record_max_bytes=5 must be at least 16777216"),
    ],
)
def test_wrong_configuration_is_refused(values: dict[str, float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, r"port=70000 must be in \[0, 65535\]"),
        ({"max_prompt_bytes": 0}, "max_prompt_bytes=0 must be in"),
        ({"max_prompt_bytes": 200 << 20}, r"max_prompt_bytes=209715200 must be in"),
        ({"api_key": ""}, "api_key of 0 characters must be"),
        ({"api_key": "schlüssel"}, "must be printable ASCII"),
        ({"api_key": " key"}, "without space at its ends"),
        ({"api_keys": ""}, "api_keys is empty"),
        ({"http_port": 50051}, "http_port=50051 must be another than port=50051"),
        ({"max_n": 0}, r"max_n=0 must be in \[1, "),
        ({"max_body_bytes": 0}, "max_body_bytes=0 must be in"),
        ({"max_buffered_bytes": 1}, "max_buffered_bytes=1 must be in"),
        ({"max_requests": 0}, "max_requests=0 must be in"),
        ({"max_connections": 0}, "max_connections=0 must be in"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0 must be at least 1"),
        ({"max_requests_per_key": 0}, "max_requests_per_key=0 must be at least 1"),
        ({"drain_timeout_s": -1}, "drain_timeout_s=-1 must be in"),
        ({"resume_timeout_s": float("nan")}, "resume_timeout_s=nan must be in"),
        ({"write_timeout_s": 0}, "write_timeout_s=0 must be in"),
        ({"tls_cert": "cert.pem"}, "tls_cert and tls_key must be set together"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"otlp_endpoint": ""}, "otlp_endpoint is empty"),
        ({"cors_origin": ("https://a.org/",)}, "cors_origin='https://a.org/' must be"),
        ({"cors_origin": ("*", "a.org")}, "cors_origin='a.org' must be"),
    ],
)
def test_wrong_frontend_configuration_is_refused(
    values: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FrontendConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frontends": -1}, r"frontends=-1 must be in \[0, 32\]"),
        ({"frontends": 33}, r"frontends=33 must be in \[0, 32\]"),
        ({"engine_port": 65536}, r"engine_port=65536 must be in \[0, 65535\]"),
    ],
)
def test_a_wrong_configuration_of_serve_is_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**values)


def test_static_workers_have_a_rank_each() -> None:
    config = parse("--launcher=static", "--tp=2", "--workers=one:5, [::1]:6")
    assert config.worker_list == ["one:5", "[::1]:6"]
    assert EngineConfig().worker_list == []


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        (["--port=5"], None, f"{WORKER_TOKEN} is not set"),
        (["--port=5"], "", f"{WORKER_TOKEN} is not set"),
        (["--port=5"], " x", f"{WORKER_TOKEN} of 2 characters must be printable"),
        (["--port=5", "--host=0.0.0.0"], "x", "host='0.0.0.0' would open the ranks' rendezvous"),
        (["--port=5", "--cluster-certs=/no"], "x", "cluster_certs: /no/ca.pem can't be read"),
        (["--port=5", "--host=203.0.113.1"], "x", "host=203.0.113.1 port=5 can't be bound"),
    ],
)
def test_a_worker_that_nobody_could_use_is_refused(
    options: list[str], token: str | None, message: str
) -> None:
    result = CliRunner().invoke(cli, ["worker", *options], env={WORKER_TOKEN: token})
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize("options", [[], ["--port=0"], ["--port=1", "--cuda-device=-1"]])
def test_a_worker_needs_a_port_that_its_driver_knows(options: list[str]) -> None:
    assert CliRunner().invoke(cli, ["worker", *options]).exit_code == 2
