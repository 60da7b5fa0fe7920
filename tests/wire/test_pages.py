import re

import pytest

from runtime.frontend.pages import pages

pytestmark = pytest.mark.wire


def test_the_page_and_its_parts_are_found_with_their_types():
    kinds = {path: kind for path, (kind, _) in pages().items()}
    assert kinds == {
        "/": "text/html; charset=utf-8",
        "/app.js": "text/javascript",
        "/style.css": "text/css",
    }


def test_the_page_refers_to_its_own_parts_alone():
    files = pages()
    html = files["/"][1].decode()
    parts = set(re.findall(r'(?:src|href)="([^"]*)"', html))
    assert parts == {"/app.js", "/style.css", "data:,"}
    for _, content in files.values():
        assert re.search(rb"https?://|@import|url\(", content) is None


def test_text_of_models_never_becomes_markup():
    script = pages()["/app.js"][1].decode()
    assert (
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script) is None
    )


def test_the_key_is_kept_for_the_tab_alone():
    script = pages()["/app.js"][1].decode()
    assert "sessionStorage" in script
    assert "localStorage" not in script
    assert "document.cookie" not in script


def test_each_element_that_the_script_asks_for_is_in_the_page():
    files = pages()
    html = files["/"][1].decode()
    asked = set(re.findall(r'(?:byId|say)\("([^"]+)"', files["/app.js"][1].decode()))
    assert asked
    assert asked <= set(re.findall(r'\bid="([^"]+)"', html))
