"""What ``/metrics`` tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from freewheel.engine.async_engine import AsyncEngine
from freewheel.engine.outputs import RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of all prompts since the server began, and what the engine does now."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("freewheel_requests", "Prompts that ended", ["reason"], registry=registry)
        self._refused = Counter("freewheel_refused", "Requests that were refused", ["status"], registry=registry)
        self._tokens = Counter("freewheel_tokens", "Tokens of prompts that ended", ["kind"], registry=registry)
        times = {"buckets": SECONDS, "registry": registry}
        self._first = Histogram("freewheel_first_token_seconds", "From arrival to the first token", **times)
        self._whole = Histogram("freewheel_request_seconds", "From arrival to the end", **times)
        self._each = Histogram("freewheel_output_token_seconds", "Per token after the first, by request", **times)
        for name, text, number in (
            ("freewheel_running", "Sequences that hold a slot", lambda: engine.stats.running),
            ("freewheel_waiting", "Sequences that wait for one", lambda: engine.stats.waiting),
            ("freewheel_preemptions", "How often a sequence had to give up its slot", lambda: engine.stats.preemptions),
        ):
            Gauge(name, text, registry=registry).set_function(number)

    def ended(self, output: RequestOutput) -> None:
        """Count a prompt whose choices have all ended."""
        metrics = output.metrics
        self._requests.labels(output.outputs[0].finish_reason).inc()
        counts = {"prompt": metrics.prompt_tokens, "cached": metrics.cached_tokens, "output": metrics.output_tokens}
        counts |= {"drafted": metrics.speculation.drafted, "accepted": metrics.speculation.accepted}
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
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
