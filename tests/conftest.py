"""Fixtures: bundles made by the real command line, each built once a session."""

import gc
import hashlib
import os
import random
import secrets
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from exporter import cli
from runtime.backends import onnxruntime
from runtime.backends.processor import overflows
from runtime.bundle.locks import locked
from runtime.errors import UnavailableError
from tests.pairs import RandomPair
from tests.processor_time import pytest_addoption, pytest_configure  # noqa: F401
from tests.rtx import every_graph_is_parsed

if TYPE_CHECKING:
    from exporter.training.store import Text
    from exporter.training.target import Target

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of commands that tests run; see below
# Machines are shared, so no test is timed. `make test-all` draws as many examples as hypothesis does by default, new
# ones every time; `make test` gives the same verdict on the same commit.
settings.register_profile("exhaustive", deadline=None)
settings.register_profile("representative", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("representative")
torch.set_num_threads(1)  # threads that wait for one another slow small tensors down, many times over on a busy machine
# a shell's background processes ignore it, and so would commands that tests run
signal.signal(signal.SIGINT, signal.default_int_handler)
DEMO = Path(__file__).parent.parent / "demo"


def numbers(options: Sequence[str]) -> list[str]:
    """An export's options; nothing is quantized unless they ask for it, so that drafts equal those of the formulas."""
    return [*options, *([] if {"--draft-weights", "vllm"} & set(options) else ["--draft-weights", "none"])]


def examples(count: int) -> settings:
    """So many examples in `make test-all`, and the same share of them otherwise as where nothing is set."""
    return settings(max_examples=count * settings().max_examples // 100)


MakeBundle = Callable[..., Path]

# The demo pair for every backend: several tests share what this exports to.
SIZES = ("--dtype", "fp32", "--rows", "8", "--capacity", "200")
ALL = ("--backend", "cpu", "migraphx", "tensorrt", "tensorrt-rtx", "cuda", *SIZES)
EVERY_BACKEND = (*ALL, "--heads", "2")
ODD = RandomPair({"head_dim": 24, "attention_bias": True}, layers=3, heads=1, seed=11)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector would go over its millions of objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Products of bytes (w8a8) are skipped where the processor cannot sum them."""
    try:
        return (yield)
    except UnavailableError as error:
        if overflows() and "VNNI" in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from pytest_runtest_call())


@pytest.fixture(autouse=True)
def seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose seed nobody gave is the same in every run of a test."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture(autouse=True, scope="session")
def whole_trees() -> Iterator[None]:
    """Engines are compiled without measuring their passes, so that no cycle depends on what the machine does beside;
    where plans are tested, costs are given."""

    class Unmeasured:
        def save(self, folder: Path, suffix: str = "") -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.engines.store.measure", lambda decoder: Unmeasured())
        patch.setattr("runtime.engines.store.physical_cores", lambda: 1)  # there is no other number of threads to try
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Where a test names no number of threads: those of two processes would wait for one another, spinning."""
    options = onnxruntime.session_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "session_options", lambda bundle, threads: options(bundle, threads or 1))
        yield


@pytest.fixture(autouse=True, scope="session")
def parsed_graphs() -> Iterator[None]:
    """Every graph that a test writes for TensorRT is read by NVIDIA's own parser, where that is installed."""
    with every_graph_is_parsed():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of a session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def make_bundle(shared: Path) -> MakeBundle:
    """(RandomPair or folder of a pair, option, ...) -> a bundle; the pair's folder is its sibling ``pair``.
    drafter=False leaves the drafter out. Each is exported once a session, whichever of its processes wants it first."""
    made: dict[tuple[str, ...], Path] = {}

    def make(pair: RandomPair | Path, *options: str, drafter: bool = True) -> Path:
        key = (repr(pair), *options, *([] if drafter else ["no drafter"]))
        if key not in made:
            root = shared / f"bundle-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
            with locked(root.with_suffix(".lock"), "another process exports this bundle", wait=lambda _: None):
                if not (root / "out").exists():
                    export(
                        pair, root, ["--ckpt", str(root / "pair/drafter"), *numbers(options)] if drafter else options
                    )
            made[key] = root / "out"
        return made[key]

    def export(pair: RandomPair | Path, root: Path, options: Sequence[str]) -> None:
        root.mkdir()
        if isinstance(pair, RandomPair):
            pair.write(root / "pair")
        else:
            (root / "pair").symlink_to(pair)
        argv = ["--target", str(root / "pair/target"), "--out", str(root / "out")]
        assert cli.main([*argv, *options]) == 0

    return make


def with_template(bundle: Path, folder: Path, template: str) -> Path:
    """A copy of a bundle with a chat template of its own."""
    shutil.copytree(bundle, folder, copy_function=os.link, ignore=shutil.ignore_patterns("chat_template.jinja"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def demo_bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle(DEMO)


@pytest.fixture(scope="module")
def chat_bundle(make_bundle: MakeBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair as servers' tests use it, in a folder ``demo`` of its own for each module."""
    from tests.serving import TEMPLATE  # imports what only servers need

    made = make_bundle(DEMO, "--weights", "int8", "--rows", "8", "--capacity", "200")
    return with_template(made, tmp_path_factory.mktemp("served") / "demo", TEMPLATE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for pages."""
    api = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright, which is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("pages are tested in chromium, which is not installed")
    options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=options)  # each launch has a fresh profile
        yield running
        running.close()


@pytest.fixture(scope="module")
def loaded() -> "Target":
    """The demo target, to train drafters for."""
    from exporter.training import target

    torch.manual_seed(0)
    return target.load(str(DEMO / "target"))


@pytest.fixture(scope="module")
def written(loaded: "Target", tmp_path_factory: pytest.TempPathFactory) -> "Text":
    """Text to train them on."""
    from tests.training import write_source

    return write_source(tmp_path_factory.mktemp("text"), loaded)
