"""Drafts in vLLM and in our own runtime, with drafters of any family, and compares texts and drafts.

    python -m tools.check_vllm --prompts SETS/*.jsonl --drafters demo/drafter FOLDER...

To be run where both vLLM and this project are installed. Exports each drafter with the target for the CPU, drafting a
chain, all in fp32; vLLM reads the same checkpoint, and of a Gumiho what the export for vLLM writes. Greedily, vLLM's
texts with the drafter must be its texts without it: one and several at once, with chains of different lengths. One at
a time, vLLM's drafts must be our runtime's, draft by draft, as far as the texts are equal. If our export drafts only
some tokens, a draft may differ from vLLM's other token on. With a Gumiho, drawn texts must have the same distribution
with and without drafts (chi-squared test of the first tokens). Prints what was compared; exits with 1 if something
differs.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from exporter import ExportConfig, export
from exporter.checkpoints.families import GUMIHO
from runtime import load
from runtime.cli.command import run
from tools.load import read_prompts
from tools.vllm_drafters import Drafter, prepared

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
Prompts = Sequence[Sequence[int]]


@contextmanager
def vllm(target: Path, drafter: Drafter | None = None, drafted: int = 0, **settings: Any) -> Iterator[Any]:
    """vLLM with a target, and a drafter of so many tokens."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = drafter and {
        "method": drafter.method,
        "model": str(drafter.theirs.absolute()),
        "num_speculative_tokens": drafted,
        **settings,
    }
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=_POSITIONS,
        enforce_eager=True,
        max_num_seqs=_BATCH,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@contextmanager
def recorded() -> Iterator[list[list[Draft]]]:
    """Every proposal of vLLM within the block: a draft for each text of the batch."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found, propose = list[list[Draft]](), GPUModelRunner.propose_draft_token_ids

    def recording(self: Any, *arguments: Any, **inputs: Any) -> Any:
        tokens = propose(self, *arguments, **inputs)
        found.append([tuple(row) for row in tokens.tolist()])
        return tokens

    GPUModelRunner.propose_draft_token_ids = recording
    try:
        yield found
    finally:
        GPUModelRunner.propose_draft_token_ids = propose


def texts(llm: Any, prompts: Prompts, tokens: int, **settings: Any) -> list[Draft]:
    """The token ids of texts, which several at once are decoded of."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, **{"temperature": 0.0, **settings})
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tuple(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]


def ours(bundle: Path, prompts: Prompts, tokens: int) -> list[tuple[Draft, list[Draft]]]:
    """Texts and drafts of our runtime."""
    found = []
    with load(bundle) as model:
        for prompt in prompts:
            generation = model.generate(list(prompt), tokens, lookup=False, rows=model.bundle.manifest.rows, trace=True)
            drafts = [cycle.tree.tokens[1:] for cycle in generation.cycles() if cycle.tree]
            found.append((tuple(generation.ids), drafts))
    return found


def other_drafts(theirs: Sequence[Draft], mine: Sequence[Draft], known: Container[int]) -> tuple[list[str], int]:
    """Where two texts' drafts differ, and how many differ from a token on that our drafter does not know. Our last
    ones may be shorter, since no text is longer than was asked for."""
    wrong, unknown = list[str](), 0
    for i, (a, b) in enumerate(zip(theirs, mine, strict=False)):
        first = next((token for token, own in zip(a, b, strict=False) if token != own), None)
        if first is None:
            continue
        if first in known:
            wrong.append(f"draft {i}: vLLM {a}, ours {b}")
        else:
            unknown += 1
    return wrong, unknown


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


def exported(drafter: Drafter, target: Path, out: Path) -> Path:
    """The pair for the CPU."""
    files: dict[str, Any] = {"ckpt": (drafter.ours,), "target": target, "out": out, "overwrite": True}
    exact: dict[str, Any] = {"weights": "none", "draft_weights": "none", "capacity": _POSITIONS}
    return export(ExportConfig(**files, **exact, draft_tree=drafter.tree, rows=1 + drafter.chains[-1]))


def greedy(llm: Any, prompts: Prompts, plain: Sequence[Draft], tokens: int) -> Iterator[str | list[Draft]]:
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


def compare(drafter: Drafter, args: argparse.Namespace, prompts: Prompts, plain: Sequence[Draft]) -> list[str]:
    """What differs with a drafter. plain: vLLM's texts without it."""
    drafts, wrong = list[list[Draft]](), list[str]()
    for drafted in drafter.chains:
        with vllm(args.target, drafter, drafted) as llm:
            found = list(greedy(llm, prompts, plain, args.new_tokens))
        wrong += [one for one in found if isinstance(one, str)]
        drafts = [one for one in found if isinstance(one, list)]
    own = ours(exported(drafter, args.target, args.out / drafter.name / "cpu"), prompts, args.new_tokens)
    equal = [i for i, (text, _) in enumerate(own) if text == plain[i]]
    differing = {i: other_drafts(drafts[i], own[i][1], drafter.known) for i in equal}
    compared, unknown = sum(len(own[i][1]) for i in equal), sum(count for _, count in differing.values())
    others = [f"prompt {i}, {one}" for i, (several, _) in differing.items() for one in several]
    print(
        f"{compared} of our drafts, of {len(equal)} texts: {len(others)} are not vLLM's"
        + f", besides {unknown} in which vLLM drafts a token that we do not" * (unknown > 0)
    )
    return [*wrong, *others, *(f"prompt {i}: our text is not vLLM's" for i in range(len(own)) if i not in equal)]


def compare_all(args: argparse.Namespace) -> int:
    os.environ.update(_ENVIRONMENT)
    drafters = [
        drafter
        for folder in args.drafters
        for drafter in prepared(folder, args.target, args.out / folder.name / "vllm", args.drafted)
    ]
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[:_PROMPT] for text in read_prompts(args.prompts, args.count)]
    drawing: dict[str, Any] = {"tokens": _FIRST, "temperature": 1.0}
    with vllm(args.target) as llm:
        plain = texts(llm, prompts, args.new_tokens)
        drawn = texts(llm, [prompts[0]] * _DRAWN, **drawing)
    wrong = list[str]()
    for drafter in drafters:
        print(f"{drafter.name}: {drafter.family}, in vLLM {drafter.method}")
        found = compare(drafter, args, prompts, plain)
        if drafter.family == GUMIHO:
            with vllm(args.target, drafter, drafter.chains[-1], draft_sample_method="probabilistic") as llm:
                found += filter(None, [distribution(drawn, texts(llm, [prompts[0]] * _DRAWN, **drawing))])
        wrong += [f"{drafter.name}: {one}" for one in found]
    print("\n".join(wrong) or "nothing differs")
    return int(bool(wrong))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("demo/target"), help="(default: demo/target)")
    parser.add_argument(
        "--drafters", type=Path, nargs="+", default=[Path("demo/drafter")], help="folders (default: demo/drafter)"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with 'turns' or 'prompt'")
    parser.add_argument("--count", type=int, default=3, help="prompts of each file (default: 3)")
    parser.add_argument(
        "--drafted",
        type=int,
        default=7,
        help="tokens to draft at most; of a Medusa always those of all heads (default: 7)",
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of a text at most (default: 128)")
    parser.add_argument("--out", type=Path, default=Path("build/check-vllm"), help="(default: build/check-vllm)")
    args = parser.parse_args(argv)
    return run(lambda: compare_all(args))


if __name__ == "__main__":
    sys.exit(main())
