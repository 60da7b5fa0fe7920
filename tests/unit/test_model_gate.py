"""Which models are let through untested, and what becomes of the verdict on the others."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import helper_process, model_gate
from runtime.errors import ConfigError
from runtime.helper_process import Outcome
from runtime.model_gate import TESTED_TYPES, check_model

pytestmark = pytest.mark.unit

ACCEPTED = json.dumps({"accepted": True, "reason": "", "is_certain": True})
REFUSED = json.dumps({"accepted": False, "reason": "it recurs", "is_certain": True})
UNCERTAIN = json.dumps({"accepted": False, "reason": "no memory", "is_certain": False})


class Gate:
    """Stands for the helper process: gives what it is told to, and writes down what it is asked."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = root / "model"
        self.folder.mkdir()
        self.verdicts = root / "lockstep" / "verdicts"
        self.outcome = Outcome(0, [ACCEPTED], timed_out=False)
        self.asked: list[list[str]] = []
        self.options: dict[str, Any] = {}
        self.messages: list[str] = []
        self.configure(model_type="olmoe", num_hidden_layers=16)
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        monkeypatch.setattr(model_gate, "run_helper", self._run)

    def configure(self, **values: object) -> None:
        (self.folder / "config.json").write_text(json.dumps(values))

    def check(self, *, tp: int = 2) -> None:
        check_model("org/model", self.folder, tp=tp, on_message=self.messages.append)

    def kept(self) -> list[Path]:
        return list(self.verdicts.iterdir()) if self.verdicts.exists() else []

    def _run(self, module: str, arguments: list[str], **options: Any) -> Outcome:
        assert module == "workers.gate"
        self.asked.append(arguments)
        self.options = options
        for line in self.outcome.lines:
            options["on_line"](line)
        return self.outcome


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(tmp_path, monkeypatch)


@pytest.mark.parametrize("model_type", sorted(TESTED_TYPES))
def test_a_type_that_tests_know_passes_at_once(gate: Gate, model_type: str) -> None:
    gate.configure(model_type=model_type)
    gate.check()
    assert gate.asked == []
    assert gate.messages == []
    assert gate.kept() == []


def test_an_accepted_model_is_tested_once(gate: Gate) -> None:
    gate.check()
    gate.check()
    assert gate.asked == [[str(gate.folder), "--tp", "2"]]
    assert [message for message in gate.messages if "olmoe" in message] == gate.messages
    assert len(gate.messages) == 1
    assert len(gate.kept()) == 1


def test_the_helper_is_kept_from_devices_and_network(gate: Gate) -> None:
    gate.check()
    environment = gate.options["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert gate.options["timeout_s"] == model_gate.TIMEOUT_S


def test_a_refused_model_says_why_now_and_later(gate: Gate) -> None:
    gate.outcome = Outcome(0, ["a warning", REFUSED], timed_out=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match="model='org/model' isn't served: it recurs"):
            gate.check()
    assert len(gate.asked) == 1


def test_a_verdict_that_may_be_an_accident_is_not_kept(gate: Gate) -> None:
    gate.outcome = Outcome(0, [UNCERTAIN], timed_out=False)
    with pytest.raises(ConfigError, match="isn't served: no memory"):
        gate.check()
    assert gate.kept() == []
    gate.outcome = Outcome(0, [ACCEPTED], timed_out=False)
    gate.check()
    assert len(gate.asked) == 2


def other_config(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.configure(model_type="olmoe", num_hidden_layers=17)


def other_versions(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_gate, "version", lambda package: f"another {package}")


def other_source(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    package = gate.folder.parent / "workers"
    (package / "layers").mkdir(parents=True)
    (package / "layers" / "linear.py").write_text("changed = True\n")

    class Spec:
        submodule_search_locations = (str(package),)

    monkeypatch.setattr(model_gate, "find_spec", lambda name: Spec)


@pytest.mark.parametrize("change", [other_config, other_versions, other_source])
def test_what_changed_is_tested_again(
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Gate, pytest.MonkeyPatch], None],
) -> None:
    gate.check()
    change(gate, monkeypatch)
    gate.check()
    gate.check()
    assert len(gate.asked) == 2
    assert len(gate.kept()) == 2


def test_every_change_of_the_source_counts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    other_source(gate, monkeypatch)
    gate.check()
    (gate.folder.parent / "workers" / "layers" / "linear.py").write_text("changed = False\n")
    gate.check()
    assert len(gate.asked) == 2


def test_every_tp_is_tested(gate: Gate) -> None:
    gate.check(tp=2)
    gate.outcome = Outcome(0, [REFUSED], timed_out=False)
    with pytest.raises(ConfigError, match="it recurs"):
        gate.check(tp=4)
    gate.check(tp=2)
    assert [arguments[-1] for arguments in gate.asked] == ["2", "4"]


def test_the_order_of_keys_and_the_folder_do_not_count(gate: Gate, tmp_path: Path) -> None:
    gate.check()
    gate.folder = tmp_path / "copy"
    gate.folder.mkdir()
    gate.configure(num_hidden_layers=16, model_type="olmoe")
    gate.check()
    assert len(gate.asked) == 1


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (Outcome(-signal.SIGKILL, [ACCEPTED], timed_out=True), "took longer than 180 s"),
        (Outcome(-signal.SIGKILL, [], timed_out=False), "failed: it was killed, as happens where"),
        (Outcome(1, ["Traceback", "KeyError: 'b'"], timed_out=False), "code 1 and: Trace.*\nKeyEr"),
        (Outcome(1, [ACCEPTED], timed_out=False), "failed: it ended with code 1"),
        (Outcome(2, ["error: no such folder"], timed_out=False), "failed: no such folder"),
        (Outcome(0, [], timed_out=False), "failed: it ended with code 0 and: nothing"),
        (Outcome(0, ["la", "la la"], timed_out=False), "failed: .* code 0 and: la\nla la"),
        (Outcome(0, [ACCEPTED, "done"], timed_out=False), "failed: .*\ndone"),
        (Outcome(0, ["true"], timed_out=False), "failed: it ended with code 0 and: true"),
        (Outcome(0, ["{}"], timed_out=False), "failed: it ended with code 0 and: {}"),
        (Outcome(0, [ACCEPTED.replace("true", '"no"', 1)], timed_out=False), 'failed: .*"no"'),
    ],
)
def test_a_test_without_a_verdict_lets_nothing_through(
    gate: Gate, outcome: Outcome, sentence: str
) -> None:
    gate.outcome = outcome
    with pytest.raises(ConfigError, match=f"(?s)model='org/model' isn't served: the .*{sentence}"):
        gate.check()
    assert gate.kept() == []
    gate.outcome = Outcome(0, [ACCEPTED], timed_out=False)
    gate.check()
    assert len(gate.asked) == 2


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import signal; print('begun', flush=True); signal.pause()", "took longer than 1 s"),
        ("import os; os.abort()", "failed: it ended with code -6 and: nothing"),
        (f"import sys; print({ACCEPTED!r}); sys.stderr.write('late')", "with code 0 .*late"),
    ],
)
def test_processes_that_come_to_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, sentence: str
) -> None:
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        assert command[1:4] == ["-P", "-m", "workers.gate"]
        return real([sys.executable, "-c", script], **options)

    run = model_gate.run_helper
    gate = Gate(tmp_path, monkeypatch)
    monkeypatch.setattr(model_gate, "run_helper", run)
    monkeypatch.setattr(model_gate, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(helper_process.subprocess, "Popen", start)
    with pytest.raises(ConfigError, match=f"(?s){sentence}"):
        gate.check()
    assert gate.kept() == []


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"\xff", b"{}", b'{"accepted": true}', ACCEPTED[:-9].encode()]
)
def test_a_damaged_verdict_is_made_again(
    gate: Gate, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    gate.check()
    (file,) = gate.kept()
    file.write_bytes(damage)
    gate.check()
    assert f"verdict {file} can't be read, the model is tested again" in caplog.text
    gate.check()
    assert len(gate.asked) == 2


def test_where_verdicts_cannot_be_kept_they_count_once(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lockstep").write_text("a file where the folder should be")
    gate.check()
    (record,) = [r for r in caplog.records if "can't be kept" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert str(gate.verdicts) in record.getMessage()
    gate.outcome = Outcome(0, [REFUSED], timed_out=False)
    with pytest.raises(ConfigError, match="it recurs"):
        gate.check()
    assert len(gate.asked) == 2


def test_two_starts_at_once_see_whole_verdicts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace
    seen: list[list[str]] = []

    def replace(source: Path, target: Path) -> None:
        """The last moment before a verdict is there: a second start looks, tests and keeps."""
        monkeypatch.setattr(model_gate.os, "replace", real)
        assert not target.exists()
        assert json.loads(source.read_text()) == json.loads(ACCEPTED)
        gate.check()
        seen.extend(gate.asked)
        assert json.loads(target.read_text()) == json.loads(ACCEPTED)
        real(source, target)

    monkeypatch.setattr(model_gate.os, "replace", replace)
    gate.check()
    gate.check()
    assert len(seen) == len(gate.asked) == 2
    (file,) = gate.kept()
    assert json.loads(file.read_text()) == json.loads(ACCEPTED)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "can't be read: .*No such file"),
        (b"{", "can't be read: Expecting property name"),
        (b"\xff", "can't be read: 'utf-8' codec"),
        (b"[1]", "must hold a JSON object"),
    ],
)
def test_a_broken_configuration_is_named(gate: Gate, content: bytes | None, sentence: str) -> None:
    file = gate.folder / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file} {sentence}"):
        gate.check()
    assert gate.asked == []


def test_a_configuration_without_a_type_is_tested(gate: Gate) -> None:
    gate.configure(num_hidden_layers=2)
    gate.outcome = Outcome(0, [REFUSED], timed_out=False)
    with pytest.raises(ConfigError, match="it recurs"):
        gate.check()
    assert len(gate.asked) == 1
