"""The statistics of a generation as a short table."""

from ..decoding.stats import Stats


def table(stats: Stats) -> str:
    """One line for each subject; times in milliseconds."""
    s, cycles = stats.summary(), max(1, stats.cycles)
    drafted = sum(stats.accepted)
    sources = {"target": stats.tokens - drafted - stats.looked_up, "drafter": drafted, "prompt lookup": stats.looked_up}
    times = {"draft": stats.draft_ns, "target": stats.target_ns, "host": stats.host_ns}
    per_pass = ", ".join(f"{name} {ns / 1e6 / cycles:.3g}" for name, ns in times.items())
    lines = {
        "prompt": f"{stats.prompt_tokens} tokens ({stats.cached_tokens} cached), first token after "
        f"{s['time_to_first_token_ms']:.4g} ms",
        "generated": f"{stats.tokens} tokens{f' ({stats.finish_reason})' if stats.finish_reason else ''}, "
        f"{s['tokens_per_second']:.4g} tokens/s",
        "per pass": f"{s['tau']:.3g} tokens (tau) in {sum(times.values()) / 1e6 / cycles:.3g} ms: {per_pass} "
        f"({stats.cycles} passes)",
        "from": ", ".join(f"{name} {count}" for name, count in sources.items()),
    }
    if len(stats.rows) > 1:
        lines["rows"] = ", ".join(f"{rows}: {stats.rows[rows]}" for rows in sorted(stats.rows)) + " (verified: passes)"
    if stats.accepted:
        shares = s["acceptance_by_depth"]
        lines["accepted"] = (
            ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(shares, 1)) + " (depth: share of passes)"
        )
    if stats.seed is not None:
        lines["seed"] = str(stats.seed)
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())
