"""The dashboard shows what there is, and Grafana can import it."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.frontend.metrics import FrontendMetrics
from tests.engine_stats import MODEL, make_stats

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"
WIDTH = 24
ROWS = ["Requests", "Latencies", "Tokens", "Cache", "Steps", "Faults"]
# What Prometheus adds to what it scrapes.
TARGET_LABELS = {"job", "instance"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "lockstep.json").read_text())
    return found


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Labels of each metric."""
    metrics = FrontendMetrics()
    metrics.count_open("/v1/completions")
    metrics.count_request("/v1/completions", "ok", 1.0)
    body, _ = metrics.render({"engine:1": make_stats()}, MODEL)
    labels = defaultdict(set)
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return labels


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


def test_every_query_is_of_metrics_that_there_are(
    dashboard: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    for query in queries(dashboard):
        names = re.findall(r"lockstep_\w+", query)
        assert names, query
        assert set(names) <= exposed.keys(), query


def test_every_query_is_by_labels_that_there_are(
    dashboard: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    for query in queries(dashboard):
        labels = set(re.findall(r"(\w+)=", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            labels |= set(group.split(", "))
        for name in re.findall(r"lockstep_\w+", query):
            assert labels <= exposed[name] | TARGET_LABELS, query


def test_every_legend_is_of_labels_that_its_query_keeps(dashboard: dict[str, Any]) -> None:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            kept = "".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in kept or "by" not in target["expr"], target


def test_a_query_has_its_brackets_closed_and_rates_go_by_the_interval(
    dashboard: dict[str, Any],
) -> None:
    for query in queries(dashboard):
        for left, right in ("()", "[]", "{}"):
            assert query.count(left) == query.count(right), query
        assert query.count("[$__rate_interval]") == len(re.findall(r"rate\(|increase\(", query))


def test_counters_are_shown_as_rates_and_nothing_else_is(dashboard: dict[str, Any]) -> None:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            for before, name in re.findall(r"(\w*)\(?(lockstep_\w+)", target["expr"]):
                is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
                assert is_counter == (before in ("rate", "increase")), target["expr"]


def test_grafana_can_import_it(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"] == "lockstep"
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36  # data sources by uid
    assert "id" not in dashboard, "an id belongs to one Grafana"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    (source,) = (v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    for panel in panels_of(dashboard):
        assert panel["title"]
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)


def test_there_is_a_row_for_each_subject(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ROWS


def test_no_panel_covers_another(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
