import json
import logging
from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.driver import resolve_defaults
from runtime.errors import ConfigError
from runtime.generation_config import read_defaults
from runtime.sampling_params import LOCKSTEP_DEFAULTS, SamplingDefaults

pytestmark = pytest.mark.unit

# As checkpoints have them: what is honoured, and what asks for nothing.
FULL = {
    "_from_model_config": True,
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128009],
    "max_new_tokens": 2048,
    "min_p": 0.05,
    "num_beams": 1,
    "pad_token_id": 0,
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "transformers_version": "4.45.0",
    "typical_p": 1.0,
    "use_cache": False,
}


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def test_what_a_checkpoint_has_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert read_defaults(write(tmp_path, FULL)) == SamplingDefaults(
        max_tokens=2048,
        temperature=0.6,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.05,
    )
    assert caplog.messages == []


def test_a_temperature_too_small_to_matter_is_greedy(tmp_path: Path) -> None:
    folder = write(tmp_path, {"do_sample": True, "temperature": 1e-6})
    assert read_defaults(folder) == SamplingDefaults(temperature=0.0)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"eos_token_id": 1, "do_sample": None},
        dict.fromkeys(["max_new_tokens", "temperature", "top_k", "top_p", "min_p"]),
        {"top_k": 0, "repetition_penalty": None, "do_sample": True},
    ],
)
def test_what_is_left_out_is_lockstep_s_own(tmp_path: Path, content: object) -> None:
    if content is not None:
        write(tmp_path, content)
    assert read_defaults(tmp_path) == LOCKSTEP_DEFAULTS


def test_a_model_that_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    folder = write(tmp_path, {"do_sample": False, "temperature": 0.7, "top_p": 0.8})
    assert read_defaults(folder) == SamplingDefaults(temperature=0.0, top_p=0.8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -0.5}, "temperature: temperature=-0.5 must be 0 (greedy) or in [1e-05, "),
        (
            {"temperature": 1e6},
            "temperature: temperature=1000000.0 must be 0 (greedy) or in [1e-05, ",
        ),
        ('{"temperature": NaN}', "temperature: temperature=nan must be 0 (greedy) or in [1e-05, "),
        ({"temperature": "0.6"}, "temperature: temperature='0.6' is of type str: must be float"),
        ({"temperature": True}, "temperature: temperature=True is of type bool: must be float"),
        ({"top_k": -1}, "top_k: top_k=-1 must be at least 0"),
        ({"top_k": 50.0}, "top_k: top_k=50.0 is of type float: must be int"),
        ({"top_p": 0}, "top_p: top_p=0 must be in [1e-09, 1]"),
        ({"top_p": 1.1}, "top_p: top_p=1.1 must be in [1e-09, 1]"),
        ({"min_p": [0.1]}, "min_p: min_p="),
        ({"repetition_penalty": 0}, "repetition_penalty: repetition_penalty=0 must be in [0.01, "),
        ({"max_new_tokens": 0}, "max_new_tokens: max_tokens=0 must be at least 1"),
        ({"do_sample": "no"}, "do_sample='no' must be true, false or null"),
    ],
)
def test_a_value_that_requests_may_not_have_is_refused_by_file_and_key(
    tmp_path: Path, content: object, message: str
) -> None:
    folder = write(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_defaults(folder)
    assert str(raised.value).startswith(f"{folder / 'generation_config.json'}: {message}")
    assert str(raised.value).endswith(
        ": set --generation-config ignore to start without the model's defaults"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read: Expecting property name"),
        ("", "can't be read: "),
        ("[" * 100_000, "can't be read: "),
        ([1], "must hold a JSON object: "),
        ("null", "must hold a JSON object: "),
    ],
)
@pytest.mark.parametrize("generation_config", ["auto", "ignore"])
def test_a_broken_file_is_refused(
    tmp_path: Path, generation_config: Any, content: object, message: str
) -> None:
    """Also where its defaults are ignored: workers read the ends of texts from it."""
    folder = write(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        resolve_defaults(EngineConfig(generation_config=generation_config), str(folder))
    assert str(raised.value).startswith(f"{folder / 'generation_config.json'} {message}")
    assert str(raised.value).endswith(": repair the file, or remove it")


@pytest.mark.parametrize("kind", ["link into nowhere", "folder"])
def test_what_was_meant_to_be_a_file_is_not_taken_for_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "generation_config.json"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"generation_config\.json can't be read: .* remove it$"):
        read_defaults(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b'{"temperature": "\xff"}')
    with pytest.raises(ConfigError, match=r"generation_config.json can't be read: 'utf-8'"):
        read_defaults(tmp_path)


def test_what_is_not_honoured_is_told_once_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unmet = {"num_beams": 4, "suppress_tokens": [7], "max_length": 4096, "assistant": "x"}
    nothing = {"no_repeat_ngram_size": 0, "early_stopping": False, "bad_words_ids": None}
    assert read_defaults(write(tmp_path, FULL | unmet | nothing)).max_tokens == 2048
    (message,) = caplog.messages
    names = "assistant, max_length, num_beams, suppress_tokens"
    assert message == f"{tmp_path / 'generation_config.json'}: not honoured: {names}"


def test_start_up_tells_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = str(write(tmp_path, {"temperature": 0.6, "max_new_tokens": 4_000_000}))
    defaults = SamplingDefaults(temperature=0.6, max_tokens=4_000_000)
    assert resolve_defaults(EngineConfig(), folder) == defaults
    ignoring = EngineConfig(generation_config="ignore")
    assert resolve_defaults(ignoring, folder) == LOCKSTEP_DEFAULTS
    others = "top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0"
    assert caplog.messages == [
        "where requests leave them unset, generation_config auto: "
        f"max_tokens=4000000, temperature=0.6, {others}",
        "where requests leave them unset, generation_config ignore: "
        f"max_tokens=16, temperature=1.0, {others}",
    ]


def test_a_file_that_is_ignored_may_have_bad_values(tmp_path: Path) -> None:
    folder = str(write(tmp_path, {"temperature": -1}))
    ignoring = EngineConfig(generation_config="ignore")
    assert resolve_defaults(ignoring, folder) == LOCKSTEP_DEFAULTS
