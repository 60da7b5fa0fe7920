import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engine_service import EngineServer
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from tests.frontend import API_KEY, RunningFrontend
from tests.served import ScoringOracle, make_engine, text_of, write_characters

playwright = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")

CHROMIUM = shutil.which("chromium", path="/usr/bin")
TIMEOUT_S = 15
NUM_TOKENS = 6
TOKENS = '[data-number="Output tokens"] dd'

playwright.expect.set_options(timeout=TIMEOUT_S * 1000)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium isn't installed"),
]


class GatedOracle(ScoringOracle):
    """Takes a step for each permit."""

    permits: threading.Semaphore

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        return super().execute(plan, masks)

    def permit(self, num_steps: int) -> None:
        self.permits.release(num_steps)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, GatedOracle]]:
    """The page's address, and what steps wait at."""
    engine, executor = make_engine(GatedOracle, path=str(write_characters(tmp_path / "model")))
    executor.permits = threading.Semaphore(0)
    engine.start()
    server = EngineServer(engine, "engine-token")
    server.start()
    try:
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages[0].content }}")
        with RunningFrontend(server, chat_template=str(template)) as frontend:
            yield f"http://{frontend.http_address}", executor
    finally:
        executor.permit(1000)
        server.stop(grace_s=5)
        engine.stop()


def artifacts(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("LOCKSTEP_ARTIFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Watched:
    """A tab, what it asked for, and what went wrong in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(TIMEOUT_S * 1000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)
        page.goto(address)

    def connect(self, key: str) -> None:
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Connect").click()

    def run(self, max_tokens: int, endpoint: str = "completion") -> None:
        self.page.get_by_label("Prompt").fill(text_of([5, 6, 7]))
        self.page.get_by_label("Endpoint").select_option(endpoint)
        self.page.get_by_label("Max tokens").fill(str(max_tokens))
        self.page.get_by_label("Temperature").fill("0")
        self.page.get_by_role("button", name="Run").click()

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


@pytest.fixture
def tab(served: tuple[str, GatedOracle]) -> Iterator[Watched]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield Watched(browser.new_page(), served[0])
        finally:
            browser.close()


def expect(tab: Watched, selector: str) -> Any:
    return playwright.expect(tab.page.locator(selector))


def test_page_shows_live_numbers_and_streams_text(served, tab: Watched, tmp_path: Path):
    address, executor = served
    tab.connect(API_KEY)
    expect(tab, TOKENS).to_have_text("0")

    tab.run(NUM_TOKENS)
    executor.permit(2)
    expect(tab, "#output").to_have_text(re.compile("^.{2}$"))
    first = tab.page.locator("#output").text_content()
    executor.permit(NUM_TOKENS - 2)
    expect(tab, "#outcome").to_have_text("Finished: length")

    text = tab.page.locator("#output").text_content()
    assert text.startswith(first)
    assert len(text) == NUM_TOKENS
    expect(tab, TOKENS).to_have_text(str(NUM_TOKENS))
    tab.page.screenshot(path=artifacts(tmp_path) / "status-page.png", full_page=True)
    assert tab.errors == []
    assert [url for url in tab.asked if not url.startswith((f"{address}/", "data:"))] == []
    assert f"{address}/v1/completions" in tab.asked


@pytest.mark.full
def test_a_chat_streams_as_text_does(served, tab: Watched):
    address, executor = served
    executor.permit(NUM_TOKENS)
    tab.connect(API_KEY)
    expect(tab, TOKENS).to_have_text("0")

    tab.run(NUM_TOKENS, "chat")
    expect(tab, "#outcome").to_have_text("Finished: length")
    assert len(tab.page.locator("#output").text_content()) == NUM_TOKENS
    assert f"{address}/v1/chat/completions" in tab.asked
    assert tab.errors == []


@pytest.mark.full
def test_stop_ends_a_stream_and_the_page_goes_on(served, tab: Watched):
    _, executor = served
    tab.connect(API_KEY)
    expect(tab, TOKENS).to_have_text("0")

    tab.run(100)
    executor.permit(1)
    expect(tab, "#output").to_have_text(re.compile("^.$"))
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab, "#outcome").to_have_text("Stopped.")
    playwright.expect(tab.page.get_by_role("button", name="Run")).to_be_enabled()
    assert tab.errors == []


def test_wrong_key_is_told_in_a_sentence(tab: Watched):
    tab.connect("wrong")
    expect(tab, "#status").to_have_text(re.compile("key"))
    expect(tab, "#status").to_have_class("bad")
