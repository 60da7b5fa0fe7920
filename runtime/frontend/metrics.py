"""What a frontend counts of its own, and everything that a scrape of it gets.

Where frontends share a port, a scrape reaches any of them. So each keeps its numbers in files of a
folder that all have, whose sums are told (prometheus_client's multiprocess mode): the folder is in
PROMETHEUS_MULTIPROC_DIR, which must be set before the process starts. Without it a process, or a
test, keeps its numbers to itself.
"""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import psutil
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from protos import inference_pb2
from runtime.frontend.engine_metrics import EngineCollector
from runtime.request import EngineStats, ModelInfo

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DURATION_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

# Labels that clients can't make more of: all else is "other".
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
ENDPOINTS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        *(f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods),
    }
)
# Why a request was refused; the last are found before a request is read.
REJECTIONS = (
    *("invalid", "overloaded", "deadline", "unavailable", "other_model"),
    *("unauthorized", "body_too_large", "header_too_large", "too_slow"),
)
OTHER = "other"


class FrontendMetrics:
    """The numbers of one frontend process. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._folder = os.environ.get(FOLDER_VARIABLE)
        self._own = CollectorRegistry()
        self._requests = Counter(
            "lockstep_requests",
            "Requests that ended, by how.",
            ["endpoint", "status"],
            registry=self._own,
        )
        self._duration = Histogram(
            "lockstep_request_duration_seconds",
            "From a request's arrival at the frontend to its end.",
            ["endpoint"],
            buckets=DURATION_BOUNDS_S,
            registry=self._own,
        )
        self._open = Gauge(
            "lockstep_open_requests",
            "Requests that frontends are answering.",
            ["endpoint"],
            multiprocess_mode="livesum",
            registry=self._own,
        )
        self._rejections = Counter(
            "lockstep_rejections",
            "Requests refused, by why; also those that lockstep_requests hasn't, which were "
            "refused before anyone looked at what they ask for.",
            ["reason"],
            registry=self._own,
        )
        self._resumed = Counter(
            "lockstep_resumed_requests",
            "Requests that went on with another engine, or the same once it was back.",
            registry=self._own,
        )
        self._reconnects = Counter(
            "lockstep_engine_reconnects", "Times that a lost engine was back.", registry=self._own
        )
        self._tokens_sent = Counter(
            "lockstep_output_tokens_sent", "Tokens given to clients.", registry=self._own
        )
        # Told from the start, so that the first of a kind is an increase. The gauge is set: a file
        # of a process that had our id, and died, may have been there.
        for endpoint in (*ENDPOINTS, OTHER):
            self._open.labels(endpoint).set(0)
        for reason in (*REJECTIONS, OTHER):
            self._rejections.labels(reason)

    def count_open(self, endpoint: str) -> None:
        """Each is ended by `count_request`."""
        self._open.labels(_known(endpoint)).inc()

    def count_request(self, endpoint: str, status: str, duration_s: float) -> None:
        """`status` is one of a fixed few."""
        endpoint = _known(endpoint)
        self._open.labels(endpoint).dec()
        self._requests.labels(endpoint, status).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def count_rejection(self, reason: str) -> None:
        """`reason` is one of REJECTIONS."""
        self._rejections.labels(reason if reason in REJECTIONS else OTHER).inc()

    def count_resumed(self) -> None:
        self._resumed.inc()

    def count_reconnect(self) -> None:
        self._reconnects.inc()

    def count_sent(self, num_tokens: int) -> None:
        self._tokens_sent.inc(num_tokens)

    def render(
        self, stats: Mapping[str, EngineStats], model: ModelInfo, addresses: Iterable[str] = ()
    ) -> tuple[bytes, str]:
        """What a scrape gets, and its content type.

        `stats` are those of the engines that answer, by address; of all `addresses` none may.
        """
        registry = CollectorRegistry()
        registry.register(EngineCollector(stats, addresses))
        registry.register(_InfoCollector(model))
        if self._folder is None:
            registry.register(_WithoutCreationTimes(self._own))
        else:
            forget_dead_processes(Path(self._folder))
            MultiProcessCollector(registry, self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


def forget_dead_processes(folder: Path) -> None:
    """What frontends that have died had open is open no more; what they counted stays."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not _is_alive(pid):
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]


def _is_alive(pid: int) -> bool:
    try:
        status: str = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return status != str(psutil.STATUS_ZOMBIE)


def _known(endpoint: str) -> str:
    return endpoint if endpoint in ENDPOINTS else OTHER


class _InfoCollector(Collector):
    """Which software serves which model."""

    def __init__(self, model: ModelInfo) -> None:
        self._labels = {
            "version": version("lockstep-serving"),
            "model": model.name,
            "architecture": model.architecture,
            "fingerprint": model.fingerprint,
            "tp_size": str(model.tp_size),
        }

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(
            "lockstep_info", "What is served; always 1.", labels=list(self._labels)
        )
        info.add_metric(list(self._labels.values()), 1)
        yield info


class _WithoutCreationTimes(Collector):
    """As in multiprocess mode: Prometheus doesn't use them, and they double the series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample for sample in metric.samples if not sample.name.endswith("_created")
            ]
            yield metric
