"""What ``/metrics`` tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from freewheel.engine.async_engine import AsyncEngine
from freewheel.engine.outputs import RequestMetrics, RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of all prompts since the server began, and what the engine does now."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("freewheel_requests", "Prompts that ended", ["reason"], registry=registry)
        self._refused = Counter("freewheel_refused", "Requests that were refused", ["status"], registry=registry)
        tokens = Counter(
            "freewheel_tokens",
            "Tokens as they come: of prompts, of these from the prefix cache, of answers, drafted, of these accepted",
            ["kind"], registry=registry,
        )  # fmt: skip
        self._tokens = {kind: tokens.labels(kind) for kind in ("prompt", "cached", "output", "drafted", "accepted")}
        times = {"buckets": SECONDS, "registry": registry}
        self._first = Histogram("freewheel_first_token_seconds", "From arrival to the first token", **times)
        self._whole = Histogram("freewheel_request_seconds", "From arrival to the end", **times)
        self._each = Histogram("freewheel_output_token_seconds", "Per token after the first, by request", **times)
        for name, text, number in (
            ("freewheel_running", "Sequences that hold a slot", lambda: engine.stats.running),
            ("freewheel_waiting", "Sequences that wait for one", lambda: engine.stats.waiting),
            ("freewheel_preemptions", "How often a sequence had to give up its slot", lambda: engine.stats.preemptions),
            ("freewheel_pages", "Pages of the key-value cache", lambda: engine.stats.pages),
            ("freewheel_pages_in_use", "Pages that sequences hold", lambda: engine.stats.pages_in_use),
            ("freewheel_busy_seconds", "How long steps were on their way", lambda: engine.stats.busy_seconds),
        ):
            Gauge(name, text, registry=registry).set_function(number)

    def observe(self, output: RequestOutput, before: RequestMetrics | None) -> None:
        """Count what is new of a prompt since its last output, and its end."""
        metrics = output.metrics
        old = {} if before is None else _tokens(before)
        for kind, count in _tokens(metrics).items():
            if count > old.get(kind, 0):
                self._tokens[kind].inc(count - old.get(kind, 0))
        if not output.finished:
            return
        self._requests.labels(output.outputs[0].finish_reason).inc()
        self._first.observe(metrics.first_token_time - metrics.arrival_time)
        self._whole.observe(metrics.finish_time - metrics.arrival_time)
        rest = metrics.output_tokens - len(output.outputs)
        if rest > 0:
            self._each.observe((metrics.finish_time - metrics.first_token_time) * len(output.outputs) / rest)

    def refused(self, status: int) -> None:
        """Count an answer that is an error."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


def _tokens(metrics: RequestMetrics) -> dict[str, int]:
    """How many there are of each kind."""
    drafts = metrics.speculation
    return {
        "prompt": metrics.prompt_tokens,
        "cached": metrics.cached_tokens,
        "output": metrics.output_tokens,
        "drafted": drafts.drafted,
        "accepted": drafts.accepted,
    }
