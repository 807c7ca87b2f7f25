"""Plants faults in a copy of the sources, one at a time, and shows that the tests catch each.

    python -m tools.planted_faults                     # every fault, each with the test that is named for it
    python -m tools.planted_faults eos-ignored --all   # this one, with all tests that `make test` runs

First the tests pass without a fault. Exits with 1 if a fault is missed, or if something keeps it from being tried.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runtime.command import run
from runtime.errors import GumihoError, InputError

ROOT = Path(__file__).parent.parent
# The same draws of hypothesis every time, as far as it can; to explain how long lists differ may take minutes.
_HOW = ("-rA", "--show-capture=no", "--tb=line", "--assert=plain", "--hypothesis-seed=0")
_ALL = ("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder")  # as the Makefile has it
_WHERE = (
    "from importlib.util import find_spec; print(*(find_spec(p).origin for p in ('exporter', 'graphs', 'runtime')), sep='\\n')"
)
_SECONDS = 3600  # after which tests count as hanging


@dataclass(frozen=True)
class Fault:
    """file: what is edited; old: text that occurs there once; new: what takes its place. test: id of the cheapest test known to fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


FAULTS = (
    # --- decoding
    Fault("acceptance-stops-a-row-early", "runtime/decoding/acceptance.py", "range(1, len(tokens))",
          "range(1, len(tokens) - 1)", "tests/test_small.py::test_a_drafter_that_is_the_target_is_always_right"),
    Fault("acceptance-under-another-parent", "runtime/decoding/acceptance.py", "parents[row] == path[-1] and",
          "parents[row] in path and", "tests/end_to_end/test_lossless.py::test_demo_pair_equals_transformers"),
    Fault("kv-rows-kept-from-the-wrong-place", "runtime/decoding/kv_cache.py", "new_rows, first + row, count)",
          "new_rows, first + at, count)", "tests/test_cache.py::test_keeping_paths_equals_a_list"),
    Fault("prompt-lookup-a-token-late", "runtime/decoding/prompt_lookup.py", "text[end + i % period]",
          "text[end + (i + 1) % period]", "tests/test_lookup.py::test_the_last_place_alike_is_found"),
    Fault("planner-never-pauses", "runtime/decoding/planner.py", "return self._balance < -_MAX_LOSS", "return False",
          "tests/test_planner.py::test_drafting_that_never_pays_costs_two_percent"),
    Fault("session-lacks-its-last-token", "runtime/decoding/decoder.py",
          "shared, positions = self.shared(text), self.history.positions",
          "shared, positions = self.shared(text) - 1, self.history.positions",
          "tests/test_target_only.py::test_sessions_are_resumed_saved_and_restored"),
    Fault("prefix-reused-a-token-too-far", "runtime/decoding/decoder.py", "return sum(1 for _ in takewhile(",
          "return 1 + sum(1 for _ in takewhile(", "tests/test_target_only.py::test_sessions_are_resumed_saved_and_restored"),
    Fault("lossy-without-a-warning", "runtime/generate.py", "    if chosen.lossy:",
          "    if chosen.lossy and not chosen.speculate:", "tests/test_generate.py::test_lossy_ways_say_so_and_by_how_much"),
    # --- sampling
    Fault("top-k-keeps-one-fewer", "runtime/decoding/sampling.py", "row >= np.partition", "row > np.partition",
          "tests/test_sampling.py::test_kept_is_transformers"),
    Fault("top-p-keeps-one-fewer", "runtime/decoding/sampling.py", "np.searchsorted(before, wanted)) + 1]",
          "np.searchsorted(before, wanted))]", "tests/test_sampling.py::test_kept_is_transformers"),
    Fault("min-p-of-all-instead-of-the-best", "runtime/decoding/sampling.py", "within = np.exp(values) >= min_p",
          "within = np.exp(values) >= min_p * np.exp(values).sum()", "tests/test_sampling.py::test_kept_is_transformers"),
    Fault("repetition-penalty-rewards", "runtime/decoding/sampling.py", "np.where(values < 0,", "np.where(values > 0,",
          "tests/test_sampling.py::test_processed_is_transformers"),
    Fault("logit-bias-replaces", "runtime/decoding/sampling.py", "row[self._biased] += self._bias\n        if s.repetition",
          "row[self._biased] = self._bias\n        if s.repetition", "tests/test_sampling.py::test_processed_is_transformers"),
    Fault("noise-of-the-position-before", "runtime/decoding/sampling.py", "position = len(self._ids)\n        if s.top_k",
          "position = len(self._ids) - 1\n        if s.top_k",
          "tests/test_sampling.py::test_choice_is_the_argmax_over_all_that_is_kept"),
    Fault("drafted-a-position-behind", "runtime/decoding/proposers.py", "_cache.length[0]) + 1)", "_cache.length[0]))",
          "tests/test_small.py::test_a_drafter_that_is_the_target_is_always_right"),
    Fault("drafted-with-the-noise-of-columns", "runtime/decoding/draft_noise.py", "products(ids)",
          "products(np.arange(len(ids)))", "tests/test_draft_noise.py::test_rows_follow_the_text"),
    Fault("noise-of-another-level", "graphs/drafter.py", "logits + noise[level - 1]", "logits + noise[level - 2]",
          "tests/test_drafter.py::test_eager_tree_is_the_naive_one"),
    Fault("grammar-not-asked-where-all-is-default", "runtime/decoding/sampling.py", "or s.processors or matcher or",
          "or s.processors or", "tests/test_sampling.py::test_idle_says_that_the_largest_logit_is_the_choice"),
    Fault("logprobs-of-processed-logits", "runtime/decoding/token_selector.py", "TokenLogprobs.of(logits, token,",
          "TokenLogprobs.of(self.sampler.processed(logits), token,", "tests/test_logprobs.py::test_they_are_the_target_s_own"),
    # --- text
    Fault("stop-string-missed-across-pieces", "runtime/text/stream.py", "len(self._text) - len(piece) - len(s) + 1)",
          "len(self._text) - len(piece))", "tests/test_text.py::test_stop_strings"),
    Fault("stop-strings-beginning-shown", "runtime/text/stream.py", "min(longest, len(self._text)), 0, -1)",
          "min(longest, len(self._text)), 1, -1)", "tests/test_text.py::test_stop_strings"),
    Fault("half-a-character-shown", "runtime/text/stream.py", " or decoded.endswith(_UNKNOWN) else", " else",
          "tests/test_text.py::test_a_character_is_shown_with_its_last_byte"),
    Fault("eos-ignored", "runtime/decoding/token_selector.py", "frozenset((*manifest.eos_token_ids, *settings",
          "frozenset((*settings", "tests/test_token_selector.py::test_ends_of_every_kind"),
    # --- graphs
    Fault("tree-mask-lacks-an-ancestor", "graphs/tree.py", "for _ in range(tree.depth):\n", "for _ in range(tree.depth - 1):\n",
          "tests/test_tree.py::test_dynamic_is_the_best_of_all_candidates"),
    Fault("tree-parents-of-the-next-level", "graphs/tree.py",
          "nodes.add(token, score, parent + first, depth)\n            first, size",
          "nodes.add(token, score, parent + first + 1, depth)\n            first, size",
          "tests/test_tree.py::test_dynamic_is_the_best_of_all_candidates"),
    Fault("draft-vocabulary-not-mapped", "graphs/tree.py", "return score, target_id(ops.gather(tokens.reshape(-1), index)),",
          "return score, ops.gather(tokens.reshape(-1), index),",
          "tests/test_vocabulary.py::test_a_trimmed_tree_is_the_naive_one"),
    Fault("drafted-position-off-by-one", "graphs/drafter.py", "(length + len(drafted[0])).expand(",
          "(length + len(drafted[0]) + 1).expand(", "tests/test_drafter.py::test_eager_tree_is_the_naive_one"),
    Fault("rotary-half-turned-backwards", "graphs/dialects/plain.py", "second * c + first * s", "second * c - first * s",
          "tests/test_target.py::test_eager_is_transformers"),
    Fault("rows-see-those-behind-them", "graphs/dialects/plain.py", "row[None, :] <= torch.arange(rows",
          "row[None, :] - 1 <= torch.arange(rows", "tests/test_ops.py::test_a_pass_eager"),
    Fault("eagle-3-taps-off-by-one", "graphs/target.py", "(entering[tap] for tap in", "(entering[tap - 1] for tap in",
          "tests/test_eagle3.py::test_taps_are_what_enters_the_layers"),
    Fault("medusa-block-without-its-residual", "graphs/drafters/medusa.py", "return x + F.silu(self.linear(x))",
          "return F.silu(self.linear(x))", "tests/test_heads.py::test_eager_trees_are_the_naive_ones[medusa]"),
    Fault("hydra-reads-the-drafted-token-first", "graphs/drafters/hydra.py",
          "torch.cat((rows.to(embedded.dtype), embedded), dim=-1)", "torch.cat((embedded, rows.to(embedded.dtype)), dim=-1)",
          "tests/test_heads.py::test_eager_trees_are_the_naive_ones[hydra]"),
    Fault("shared-pass-gives-a-lane-anothers-cache", "graphs/shared_target.py", "cache = own[2 * i], own[2 * i + 1]",
          "cache = own[0], own[1]", "tests/test_shared_passes.py::test_eager_is_the_targets_own_passes"),
    # --- weights
    Fault("int4-nibbles-swapped", "exporter/weights/four_bits.py", "both = codes[0::2] + 16 * codes[1::2]",
          "both = codes[1::2] + 16 * codes[0::2]", "tests/test_quantize.py::test_codes_and_scales_against_loops"),
    Fault("int4-zero-point-off-by-one", "exporter/weights/four_bits.py",
          "scales[own], zeros[own] = torch.from_numpy(scale), torch.from_numpy(zero)",
          "scales[own], zeros[own] = torch.from_numpy(scale), torch.from_numpy(zero + 1)",
          "tests/test_calibration.py::test_codes_with_zero_points_against_loops"),
    Fault("open-size-of-the-first-axis", "exporter/capture.py", "start=axis, end=axis + 1", "start=0, end=1",
          "tests/test_capture.py::test_open_sizes_and_constants_in_onnxruntime"),
    Fault("int8-scale-of-128-steps", "exporter/weights/quantize.py", "/ 127).to(dtype)", "/ 128).to(dtype)",
          "tests/test_quantize.py::test_codes_and_scales_against_loops"),
    Fault("w8a8-smoothing-multiplies-twice", "exporter/smoothing.py", "rows[writer] = 1 / scale.flatten()",
          "rows[writer] = scale.flatten()", "tests/test_smoothing.py::test_the_model_is_the_same"),
    Fault("calibration-without-the-square", "exporter/calibration.py", "moments[name] = x.square().mean(0)",
          "moments[name] = x.abs().mean(0)", "tests/test_calibration.py::test_what_is_observed_is_transformers_own"),
    Fault("gguf-q-and-k-not-permuted", "exporter/checkpoints/gguf_file.py", ".swapaxes(1, 2).reshape(last - first",
          ".reshape(last - first", "tests/test_gguf.py::test_names_numbers_and_configuration_are_the_checkpoint_s"),
    Fault("gguf-halves-of-a-q4-block-swapped", "exporter/checkpoints/gguf_codes.py", "torch.cat((codes & 15, codes >> 4)",
          "torch.cat((codes >> 4, codes & 15)", "tests/test_as_is.py::test_a_gguf_s_codes_scales_and_logits"),
    Fault("gptq-zero-point-as-stored", "exporter/checkpoints/quantized.py", 'int(version == "gptq")', "0",
          "tests/test_quantized_checkpoints.py::test_numbers_and_codes_are_those_that_were_packed"),
    Fault("sentencepiece-merges-by-id-alone", "exporter/checkpoints/sentencepiece_bpe.py", "(-pieces.scores[i], i, -at,", "(0.0, -i, -at,",
          "tests/test_sentencepiece_bpe.py::test_ids_are_sentencepiece_s"),
    Fault("gguf-factor-without-a-type-dropped", "exporter/checkpoints/gguf_config.py", '"rope.scaling.type", "linear"',
          '"rope.scaling.type", "none"', "tests/test_gguf.py::test_rotary_scaling_is_what_llama_cpp_reads"),
    Fault("eos-of-the-tokenizer-ignored", "exporter/checkpoints/pair.py", "return named if own is None or", "return named if True or",
          "tests/test_export.py::test_the_tokenizer_s_own_end_counts_too"),
    # --- bundles
    Fault("hash-not-checked-when-loading", "runtime/loader.py", "    opened.verify(quick=True)\n", "",
          "tests/test_bundle.py::test_damaged_files_are_refused_when_loading"),
    Fault("hash-not-checked-when-compiling", "runtime/engines/store.py", "    bundle.verify()\n", "",
          "tests/test_link.py::test_compiling_finds_a_damaged_copy"),
    Fault("seal-not-checked", "runtime/bundle/records.py", "    if raw.get(SEAL) != _seal(content):", "    if SEAL not in raw:",
          "tests/test_bundle.py::test_damage_is_noticed_without_any_hash_of_the_manifest_itself"),
    Fault("manifest-path-leaves-the-bundle", "runtime/bundle/manifest_reader.py", ' or ".." in parts or', " or",
          "tests/test_bundle.py::test_hostile_manifests_are_refused_and_nothing_is_touched"),
    Fault("golden-run-takes-nan", "runtime/engines/golden_replay.py", "if not np.isfinite(values).all():",
          "if np.isinf(values).any():", "tests/test_golden.py::test_what_an_engine_may_get_wrong_is_noticed"),
    Fault("golden-tolerance-ignored", "runtime/engines/golden_replay.py",
          '            _require("target", errors["target"], tolerance)\n', "",
          "tests/test_golden.py::test_what_an_engine_may_get_wrong_is_noticed"),
    Fault("memory-taken-that-is-not-free", "runtime/engines/memory_check.py", "need.host > host_bytes:",
          "need.host > 2 * host_bytes:", "tests/test_memory.py::test_what_cannot_fit_is_refused"),
    Fault("lock-of-a-removed-file-counts", "runtime/bundle/locks.py",
          "if os.path.samestat(os.fstat(descriptor), os.stat(file)):", "if os.fstat(descriptor):",
          "tests/test_locks.py::test_a_lock_whose_file_was_removed_in_between_does_not_count"),
    Fault("interrupted-export-gets-its-name", "exporter/staging.py", "                    check()\n                    _finish",
          "                    _finish", "tests/test_export.py::test_an_interrupt_that_a_library_swallows_still_counts"),
    Fault("linked-weights-copied", "exporter/weights/packer.py", "                os.link(file, link)",
          "                link.write_bytes(file.read_bytes())",
          "tests/test_link.py::test_every_layout_is_linked_tensor_by_tensor"),
    Fault("operator-outside-the-table-passes", "exporter/backends/operators.py", "phrases = [rule]\n", "phrases = []\n",
          "tests/test_operators.py::test_refused"),
    Fault("setting-at-its-open-end-taken", "runtime/decoding/settings.py", "if not least < getattr(self, name) <= 1:",
          "if not least <= getattr(self, name) <= 1:", "tests/test_sampling.py::test_settings_that_mean_nothing"),
    Fault("training-loss-of-masked-anchors", "exporter/training/losses.py", "sums[depth] += (divergence * real).sum()",
          "sums[depth] += divergence.sum()", "tests/test_training.py::test_losses_are_those_of_a_naive_loop"),
    # --- streams and the server
    Fault("streams-share-a-cache", "runtime/decoding/engine_passes.py", "else _Shared(manifest, form, device)\n",
          "else vars(device).setdefault('shared', _Shared(manifest, form, device))\n",
          "tests/test_streams.py::test_cycles_of_streams_in_any_order"),
    Fault("prompt-counted-for-each-choice", "runtime/serve/completions.py", "len(prompt) if first else 0", "len(prompt)",
          "tests/test_serve.py::test_completions_of_several_prompts"),
    Fault("last-chunk-of-a-stream-lost", "runtime/serve/app.py", "        if body.streams_usage:\n",
          "        if body.streams_usage and not asked.usage.completion:\n", "tests/test_serve.py::test_settings"),
    Fault("stop-string-lost-in-a-request", "runtime/serve/bodies.py", "stop=self.stop,",
          "stop=self.stop[1:],", "tests/test_serve.py::test_settings"),
)  # fmt: skip


def fault_of(name: str) -> Fault:
    if found := next((fault for fault in FAULTS if fault.name == name), None):
        return found
    raise InputError(f"there is no fault {name!r}: --list names those there are")


def edited(fault: Fault, root: Path) -> str:
    """The text of the file with the fault. Raises InputError if there is not exactly one place for it."""
    file = root / fault.file
    text = file.read_text("utf-8") if file.is_file() else ""
    if (count := text.count(fault.old)) != 1:
        raise InputError(
            f"{fault.name}: its text occurs {count} times in {fault.file}, expected once: correct tools/planted_faults.py"
        )
    return text.replace(fault.old, fault.new)


def copy(folder: Path) -> None:
    """Copies what git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def tested(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status over a copy, and what it printed. Raises GumihoError if the copy's packages are not what is imported."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    where = subprocess.run(
        [sys.executable, "-c", _WHERE], cwd=folder.parent, env=environment, check=True, capture_output=True, text=True
    )
    if elsewhere := [file for file in where.stdout.splitlines() if not Path(file).is_relative_to(folder)]:
        raise GumihoError(f"tests of the copy would import {elsewhere[0]}: leave out what puts it before PYTHONPATH")
    command = [sys.executable, "-m", "pytest", *_HOW, f"--basetemp={folder.parent / 'tests'}", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"ran longer than {_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def ids(printed: str, *outcomes: str) -> list[str]:
    """The tests with one of some outcomes."""
    return re.findall(rf"^(?:{'|'.join(outcomes)}) (\S+::.*?)(?: - .*)?$", printed, re.MULTILINE)


def require_sound(faults: Sequence[Fault], everything: bool) -> None:
    """Raises GumihoError unless the tests pass without a fault."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve() / "copy"
        copy(folder)
        named = list(dict.fromkeys(fault.test for fault in faults))
        status, printed = tested(folder, _ALL if everything else named)
    passed = ids(printed, "PASSED")
    without = [] if everything else [test for test in named if not any(p == test or p.startswith(f"{test}[") for p in passed)]
    if status or without:
        told = [*ids(printed, "FAILED", "ERROR"), *re.findall("^ERROR: .*", printed, re.MULTILINE), *without, printed[-200:]]
        said = " ".join(told[0].split())
        raise GumihoError(
            f"not all tests pass without a fault ({said}): repair them, or name others in tools/planted_faults.py"
        )


def attempt(fault: Fault, everything: bool) -> bool:
    """Plants a fault and says what came of it. Returns whether a test failed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve() / "copy"
        copy(folder)
        (folder / fault.file).write_text(edited(fault, folder), "utf-8")
        status, printed = tested(folder, ["-x", *(_ALL if everything else (fault.test,))])
    failed = ids(printed, "FAILED", "ERROR")
    caught = status == 1 and bool(failed)
    by = failed[0] if caught else "no test fails" if not status else " ".join(printed.split())[-200:]
    print(f"{'caught' if caught else 'MISSED'}  {fault.name}  {time.monotonic() - started:.0f} s  {by}", flush=True)
    return caught


def plant(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}: give 1 or more")
    faults = [fault_of(name) for name in args.names] or FAULTS
    if args.list:
        print("\n".join(f"{fault.name}: {fault.file}, {fault.test}" for fault in faults))
        return 0
    for fault in faults:
        edited(fault, ROOT)
    require_sound(faults, args.all)
    with ThreadPoolExecutor(args.jobs) as pool:
        caught = list(pool.map(lambda fault: attempt(fault, args.all), faults))
    print(f"{sum(caught)} of {len(caught)} faults are caught")
    return int(not all(caught))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="only list them, each with its file and its test")
    parser.add_argument("--all", action="store_true", help="run all tests instead of the one that is named")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once (default: 1)")
    args = parser.parse_args(argv)
    return run(lambda: plant(args))


if __name__ == "__main__":
    sys.exit(main())
