"""What a generation measured of itself, counting emitted tokens only."""

from dataclasses import dataclass, field
from typing import Any

# The fields that ``add`` sums up. Lists and dicts are summed one by one, and the rest belongs to one generation.
_SUMMED = (
    "texts",
    "prompt_tokens",
    "cached_tokens",
    "tokens",
    "cycles",
    "cycle_tokens",
    "lookups",
    "looked_up",
    "prefill_ns",
    "draft_ns",
    "target_ns",
    "host_ns",
)


@dataclass
class Stats:
    """Counts and times of one generation. Times are in nanoseconds; ``summary`` converts them.

    texts: number of generations added up. cached_tokens: prompt tokens that were in the caches. cycles: target passes
    after the prefill. cycle_tokens: tokens emitted by them. rows: cycles by the number of verified rows, 1 for plain
    ones. accepted[d]: cycles that accepted at least d + 1 drafted tokens. lookups: cycles that verified a prompt
    lookup; looked_up: tokens accepted from them. seed: None if nothing was drawn.
    """

    texts: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    cycles: int = 0
    cycle_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    lookups: int = 0
    looked_up: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    target_ns: int = 0
    host_ns: int = 0
    seed: int | None = None
    finish_reason: str | None = None

    def count(self, emitted: int, times: tuple[int, int, int], rows: int = 1, lookup: bool = False) -> None:
        """Adds a cycle. emitted: its tokens, the last of them the target's own. times: nanoseconds of draft, target and
        host. rows: verified. lookup: whether a prompt lookup proposed them."""
        self.rows[rows] = self.rows.get(rows, 0) + 1
        self.cycles += 1
        self.cycle_tokens += emitted
        drafted = 0 if lookup else emitted - 1
        self.accepted += [0] * (drafted - len(self.accepted))
        for depth in range(drafted):
            self.accepted[depth] += 1
        self.lookups += lookup
        self.looked_up += emitted - 1 - drafted
        self.draft_ns += times[0]
        self.target_ns += times[1]
        self.host_ns += times[2]

    def add(self, other: "Stats") -> None:
        """Adds the counts and times of another generation."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for rows, cycles in other.rows.items():
            self.rows[rows] = self.rows.get(rows, 0) + cycles
        self.accepted += [0] * (len(other.accepted) - len(self.accepted))
        for depth, count in enumerate(other.accepted):
            self.accepted[depth] += count

    @property
    def tau(self) -> float:
        """Tokens gained per target pass."""
        return self.cycle_tokens / self.cycles if self.cycles else 0.0

    @property
    def seconds(self) -> float:
        """Time of the cycles, prefill left out."""
        return (self.draft_ns + self.target_ns + self.host_ns) / 1e9

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, prefill left out."""
        return self.cycle_tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        per_cycle = max(1, self.cycles) * 1e3
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "cycles": self.cycles,
            "cycles_by_rows": {str(rows): self.rows[rows] for rows in sorted(self.rows)},
            "tau": round(self.tau, 3),
            "lookups": self.lookups,
            "looked_up": self.looked_up,
            "acceptance_by_depth": [round(n / max(1, self.cycles), 3) for n in self.accepted],
            "draft_us_per_cycle": round(self.draft_ns / per_cycle, 1),
            "target_us_per_cycle": round(self.target_ns / per_cycle, 1),
            "host_us_per_cycle": round(self.host_ns / per_cycle, 1),
            "time_to_first_token_ms": round(self.prefill_ns / 1e6 / max(1, self.texts), 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }
