import io

import pytest

from benchmarks.terminal import LineScreen, PanelScreen, open_screen, wrap

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_panels_and_a_pipe_gets_lines() -> None:
    assert isinstance(open_screen(["a"], Terminal()), PanelScreen)
    assert isinstance(open_screen(["a"], io.StringIO()), LineScreen)


def test_lines_appear_when_they_are_full_and_the_rest_at_the_end() -> None:
    output = io.StringIO()
    screen = LineScreen(["one", "two"], output)
    for _ in range(30):
        screen.add(1, " word")
    screen.add(0, "first\nsecond")
    *_, full, finished = output.getvalue().splitlines()
    assert full == "[2]" + " word" * 18
    assert finished == "[1] first"
    screen.close()
    assert output.getvalue().splitlines()[-2:] == ["[1] second", "[2]" + " word" * 12]


def test_a_panel_shows_the_last_lines_of_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "20")
    output = Terminal()
    screen = PanelScreen(["one", "two"], output)
    screen.add(0, "\n".join(f"line {number}" for number in range(9)))
    last_drawing = output.getvalue().rpartition("\x1b[J")[2]
    assert "line 8" in last_drawing
    assert "line 3" not in last_drawing
    assert last_drawing.count("\n") == 2 * (1 + 5)


def test_wrap_keeps_every_character() -> None:
    text = "a few words  and\n\na very-long-hyphenated-word that goes on "
    lines = wrap(text, 10)
    assert max(map(len, lines)) <= 10
    assert "".join(lines) == text.replace("\n", "")
