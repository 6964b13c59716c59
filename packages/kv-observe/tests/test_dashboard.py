"""The Grafana dashboard shows what a server exports, all of it, and nothing that is not there. Nor do the alerts name
anything else.

Its names are held to a real scrape over HTTP, and its JSON to Grafana's own model of dashboards (its Foundation SDK,
which is generated from Grafana's schema). What it shows of engines, `tests/engine/test_stats.py` and
`tests/engine_sglang/test_metrics.py` hold to theirs.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from kv_core.coverage import PLAIN
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_testing.http import Served, store
from kv_testing.wait import until
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[3] / "docs" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(PAGE.read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
EXPRESSIONS = [target["expr"] for target in TARGETS]
ALERTS = yaml.safe_load((PAGE.parents[1] / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
FUNCTIONS = {"sum", "rate", "increase", "min", "count", "histogram_quantile", "group_left", "or", "unless", "offset"}


@pytest.fixture(scope="module")
def scrape() -> Iterator[dict[str, Metric]]:
    """Of a server over a disk and a directory of peers, which is away, by the names that expressions use; after stores,
    hits, a miss, evictions and a load.
    """
    with tempfile.TemporaryDirectory() as directory:
        disk: dict[str, object] = {"type": "disk", "directory": f"{directory}/kv", "capacity_bytes": 64 << 20}
        disk["quota_bytes"] = {"acme": 1 << 20}
        peers = {"type": "peers", "directory": {"url": "redis://127.0.0.1:1"}, "unprotected": True}
        served = Served(slots=4, tiers=[disk, peers])
        served.get("/metrics")  # whoever scrapes first begins the count
        cache = served.join()
        for branch in "abc":
            store(cache, 3, branch)
        cache.lookup(key_chain(3, branch="c"), "reader", shape=PLAIN)
        lease = cache.load(key_chain(3, branch="c"), "reader")
        assert isinstance(lease, ReadLease)
        cache.release(lease)
        cache.end("reader")
        cache.lookup(key_chain(2, branch="unknown"), "nobody", shape=PLAIN)
        until(lambda: re.search(r'kv_transfer_bytes_total\{.*tier="disk"', served.get("/metrics").text))
        until(lambda: "kv_directory_up{" in served.get("/metrics").text)
        served.post("/drain", {"timeout_s": 1.0})
        until(lambda: "kv_drain_under_way{" in served.get("/metrics").text)
        text = served.get("/metrics").text
        cache.close()
        served.close()
    named = {}
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        named |= {family.name + suffix: family for suffix in suffixes}
    return named


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)", "", expression)
    return {name for name in re.findall(r"\b[A-Za-z_:][\w:]*", bare) if name not in FUNCTIONS}


def test_every_expression_names_metrics_and_labels_of_a_real_scrape(scrape: dict[str, Metric]) -> None:
    ours = [target for target in TARGETS if ":kv_tiers_" not in target["expr"]]
    assert len(ours) > 30
    for target in ours:
        names = metrics_in(target["expr"])
        assert names and names <= scrape.keys(), target
        labels = {label for name in names for sample in scrape[name].samples for label in sample.labels}
        grouped = ",".join(re.findall(r"by \(([^)]*)\)", target["expr"])).replace(" ", "").split(",")
        selected = re.findall(r'(\w+)=~?"', target["expr"])
        in_legend = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert not labels or {*grouped, *selected, *in_legend} - {"", "instance"} <= labels, target  # Prometheus's own
    for variable in DASHBOARD["templating"]["list"]:
        for name, label in re.findall(r"label_values\((\w+), (\w+)\)", str(variable.get("query"))):
            assert all(label in sample.labels for sample in scrape[name].samples), variable


def test_every_alert_names_metrics_and_labels_of_a_real_scrape(scrape: dict[str, Metric]) -> None:
    assert len(ALERTS) > 10
    for alert in ALERTS:
        names = metrics_in(alert["expr"]) - {"up"}
        assert names <= scrape.keys() and (names or alert["alert"] == "KVServerDown"), alert
        labels = {label for name in names for sample in scrape[name].samples for label in sample.labels}
        told = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
        assert not labels or told - {"instance"} <= labels, alert


def test_nothing_that_is_exported_is_left_out(scrape: dict[str, Metric]) -> None:
    shown = set().union(*map(metrics_in, EXPRESSIONS))
    families = {family.name for family in scrape.values()}
    assert families == {scrape[name].name for name in shown if name in scrape}


def test_legends_say_labels_that_the_expression_keeps() -> None:
    for target in TARGETS:
        grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
        if grouped:
            kept = set(grouped[0].replace(" ", "").split(",")) - {"le"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == kept, target


def test_it_is_a_dashboard_to_grafana() -> None:
    """Its model keeps every field: one that it does not know would be lost, one of another type would not be read."""
    assert _not_read(DASHBOARD) == []
    assert _not_read({**DASHBOARD, "refersh": "30s"}) == [".refersh"]
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    taken = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(taken) == len(set(taken)), "panels lie over each other"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def _not_read(dashboard: dict[str, Any]) -> list[str]:
    return _without_defaults(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard))))


def _without_defaults(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """What of `ours` is not in `theirs`, which may have more: its defaults."""
    if isinstance(ours, dict):
        lost = [f"{place}.{name}" for name in ours if name not in theirs]
        kept = [name for name in ours if name in theirs]
        return lost + [one for name in kept for one in _without_defaults(ours[name], theirs[name], f"{place}.{name}")]
    if isinstance(ours, list):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [one for at, (own, read) in pairs for one in _without_defaults(own, read, f"{place}[{at}]")]
    return [] if ours == theirs else [place]
