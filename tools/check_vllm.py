"""Drafts with a Gumiho in vLLM and in our own runtime, and compares texts and drafts.

    python -m tools.check_vllm --prompts SETS/*.jsonl

To be run where both vLLM and this project are installed. Exports the drafter for vLLM, and the pair for the CPU with
the same chain, all in fp32. Greedily, vLLM's texts with the drafter must be its texts without it: one and several at
once, with chains of 1, 2 and all tokens. One at a time, vLLM's drafts must be our runtime's, draft by draft, as far as
the texts are equal. Drawn texts must have the same distribution with and without drafts (chi-squared test of the first
tokens). Prints what was compared; exits with 1 if something differs.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from exporter import DraftTree, ExportConfig, export
from gumiho_vllm import SERIAL_STEPS
from runtime import load
from runtime.cli.command import run
from tools.load import read_prompts

_POSITIONS = 1024
_PROMPT = 200  # tokens; of longer prompts our drafter reads the ends only (docs/decoding.md)
_BATCH = 4  # texts at once
_DRAWN, _FIRST = 600, 3  # texts that are drawn each way, and their tokens
_LEAST = 5  # a cell of the test has at least this many expected texts
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
Draft = tuple[int, ...]


@contextmanager
def vllm(target: Path, drafter: Path | None = None, drafted: int = 0, **settings: Any) -> Iterator[Any]:
    """vLLM with a target. drafter: what ``gumiho export --backend vllm`` wrote."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": drafted, **settings}
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=_POSITIONS,
        enforce_eager=True,
        max_num_seqs=_BATCH,
        enable_prefix_caching=False,
        speculative_config=speculative if drafter else None,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@contextmanager
def recorded() -> Iterator[list[list[Draft]]]:
    """Every proposal of Gumiho within the block: a draft for each text of the batch."""
    from gumiho_vllm.drafter import GumihoProposer

    found, propose = list[list[Draft]](), GumihoProposer.propose

    def recording(self: Any, *arguments: Any, **inputs: Any) -> Any:
        tokens = propose(self, *arguments, **inputs)
        found.append([tuple(row) for row in tokens.tolist()])
        return tokens

    GumihoProposer.propose = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        GumihoProposer.propose = propose  # type: ignore[method-assign]


def texts(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, **settings: Any) -> list[Draft]:
    """The token ids of texts, which several at once are decoded of."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, **{"temperature": 0.0, **settings})
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tuple(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]


def ours(bundle: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[Draft, list[Draft]]]:
    """Texts and drafts of our runtime."""
    found = []
    with load(bundle) as model:
        for prompt in prompts:
            generation = model.generate(list(prompt), tokens, lookup=False, rows=model.bundle.manifest.rows, trace=True)
            drafts = [cycle.tree.tokens[1:] for cycle in generation.cycles() if cycle.tree]
            found.append((tuple(generation.ids), drafts))
    return found


def other_drafts(theirs: Sequence[Draft], mine: Sequence[Draft]) -> list[str]:
    """Where two texts' drafts differ. Our last ones may be shorter, since no text is longer than was asked for."""
    return [
        f"draft {i}: vLLM {a}, ours {b}" for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a[: len(b)] != b
    ]


def distribution(plain: Sequence[Draft], drafted: Sequence[Draft]) -> str:
    """What differs between two samples of texts, "" if it may be chance."""
    first, second = Counter(plain), Counter(drafted)
    both = first + second
    common = [text for text, count in both.items() if count >= 2 * _LEAST]
    table = np.array([[sample[text] for text in common] for sample in (first, second)])
    table = np.column_stack((table, [len(plain), len(drafted)] - table.sum(1)))
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    value, freedom = float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1
    limit = freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
    print(f"drawn: {table.sum()} texts, chi-squared {value:.1f} at {freedom} degrees of freedom (limit {limit:.1f})")
    return "" if value <= limit else "drawn texts have another distribution with drafts"


def exported(args: argparse.Namespace) -> tuple[Path, Path]:
    """The drafter for vLLM, and the pair for the CPU."""
    files: dict[str, Any] = {"ckpt": (args.pair / "drafter",), "target": args.pair / "target", "overwrite": True}
    chain = DraftTree(policy="chain", serial_steps=SERIAL_STEPS, heads=args.heads)
    own: dict[str, Any] = {"weights": "none", "draft_weights": "none", "draft_tree": chain, "capacity": _POSITIONS}
    return (
        export(ExportConfig(**files, backend=("vllm",), out=args.out / "vllm")),
        export(ExportConfig(**files, **own, rows=1 + SERIAL_STEPS + args.heads, out=args.out / "cpu")),
    )


def greedy(
    llm: Any, prompts: Sequence[Sequence[int]], plain: Sequence[Draft], tokens: int
) -> Iterator[str | list[Draft]]:
    """Yields what differs from plain texts, and every text's drafts."""
    drafted = llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
    with recorded() as proposals:
        if texts(llm, prompts, tokens) != plain:
            yield f"with {drafted} drafted tokens, {_BATCH} texts at once differ from plain vLLM's"
        drafts = list[list[Draft]]()
        for number, prompt in enumerate(prompts):
            proposals.clear()
            if texts(llm, [prompt], tokens)[0] != plain[number]:
                yield f"prompt {number}: with {drafted} drafted tokens, the text differs from plain vLLM's"
            drafts.append([draft for (draft,) in proposals])
    emitted = sum(map(len, plain))
    print(f"{drafted} drafted tokens: {len(prompts)} texts, {emitted} tokens, {sum(map(len, drafts))} drafts")
    yield from drafts


def compare(args: argparse.Namespace) -> int:
    os.environ.update(_ENVIRONMENT)
    drafter, bundle = exported(args)
    target, most, wrong = args.pair / "target", SERIAL_STEPS + args.heads, list[str]()
    with load(bundle) as model:
        prompts = [model.encode(text)[:_PROMPT] for text in read_prompts(args.prompts, args.count)]
    with vllm(target) as llm:
        plain = texts(llm, prompts, args.new_tokens)
        drawn = texts(llm, [prompts[0]] * _DRAWN, _FIRST, temperature=1.0)
    drafts = list[list[Draft]]()
    for drafted in dict.fromkeys((1, SERIAL_STEPS, most)):
        with vllm(target, drafter, drafted) as llm:
            found = list(greedy(llm, prompts, plain, args.new_tokens))
        wrong += [one for one in found if isinstance(one, str)]
        drafts = [one for one in found if isinstance(one, list)]
    own = ours(bundle, prompts, args.new_tokens)
    equal = [i for i, (text, _) in enumerate(own) if text == plain[i]]
    differing = [f"prompt {i}, {one}" for i in equal for one in other_drafts(drafts[i], own[i][1])]
    print(f"{sum(len(own[i][1]) for i in equal)} of our drafts, of {len(equal)} texts: {len(differing)} are not vLLM's")
    wrong += [*differing, *(f"prompt {i}: our text is not vLLM's" for i in range(len(own)) if i not in equal)]
    with vllm(target, drafter, most, draft_sample_method="probabilistic") as llm:
        wrong += filter(None, [distribution(drawn, texts(llm, [prompts[0]] * _DRAWN, _FIRST, temperature=1.0))])
    print("\n".join(wrong) or "nothing differs")
    return int(bool(wrong))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", type=Path, default=Path("demo"), help="folder with target/ and drafter/ (default: demo)"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with 'turns' or 'prompt'")
    parser.add_argument("--count", type=int, default=3, help="prompts of each file (default: 3)")
    parser.add_argument("--heads", type=int, default=5, help="heads that draft (default: 5)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of a text at most (default: 128)")
    parser.add_argument("--out", type=Path, default=Path("build/check-vllm"), help="(default: build/check-vllm)")
    args = parser.parse_args(argv)
    return run(lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
