"""What speculation brought."""

from dataclasses import dataclass


@dataclass
class SpeculationMetrics:
    """Counts of verification steps; those of requests, or of periods, add up.

    Attributes:
        steps: walks, one a request and step, with a draft or without.
        drafted: draft rows that were computed.
        accepted: those of them whose token was emitted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def wasted(self) -> int:
        """Rows that were computed for nothing."""
        return self.drafted - self.accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, the one that was not drafted included; 0 before the first step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    def observe(self, drafted: int, accepted: int, steps: int = 1) -> None:
        """Count steps."""
        self.steps += steps
        self.drafted += drafted
        self.accepted += accepted

    def __add__(self, other: "SpeculationMetrics") -> "SpeculationMetrics":
        return SpeculationMetrics(
            self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted
        )
