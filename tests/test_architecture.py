"""The rules of docs/architecture.md: rooms import only what lies below them, no imports form a circle, folders and
files stay short."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the bottom up. What is in no room is at the top of its package.
RUNTIME = ["errors", "engines.devices", "bundle", "backends", "decoding.text", "decoding", "engines", "api", "cli"]
MOST_ENTRIES = {"runtime": 16, "exporter": 16}
EXPORTER = [
    "weights",
    "tracing",
    "checkpoints",
    "backends",
    "disk",
    "staging",
    "progress",
    "config",
    "recipe",
    "training",
    "writing",
]
MOST_LINES = 400


def tracked(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return sorted(file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [Path(name) for name in listed.stdout.split("\0") if name.endswith(".py") and (ROOT / name).exists()]


FILES = {
    ".".join(file.with_suffix("").parts).removesuffix(".__init__"): file
    for file in tracked("runtime", "exporter", "graphs")
}


def imports(module: str) -> Iterator[str]:
    """The project's modules that a module imports, also inside functions and for type checkers."""
    file = FILES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            names = [f"{origin}.{name.name}" for name in node.names]
            yield from {name if name in FILES else origin for name in names} & FILES.keys()
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & FILES.keys()


def room(module: str) -> tuple[str, int]:
    """The package of a module and the height of its room in it."""
    package, _, rest = module.partition(".")
    rooms = {"runtime": RUNTIME, "exporter": EXPORTER}.get(package, [])
    matching = [name for name in rooms if f"{rest}.".startswith(f"{name}.")]
    return package, rooms.index(max(matching, key=len)) if matching else len(rooms)


@pytest.mark.parametrize("module", FILES)
def test_no_file_imports_from_a_room_above_its_own(module: str) -> None:
    allowed = {"runtime": {"runtime"}, "graphs": {"graphs"}, "exporter": {"exporter", "graphs", "runtime"}}
    package, height = room(module)
    for other in imports(module):
        its_package, its_height = room(other)
        assert its_package in allowed[package], other
        assert its_package != package or its_height <= height, other


def test_no_imports_form_a_circle() -> None:
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module)) if module in path else ""
        if module in finished:
            return
        for other in imports(module):
            visit(other, (*path, module))
        finished.add(module)

    for module in FILES:
        visit(module, ())


@pytest.mark.parametrize("package", MOST_ENTRIES)
def test_the_top_of_a_package_can_be_taken_in_at_a_glance(package: str) -> None:
    shown = {file.parts[1] for file in tracked(package)}
    assert len(shown) <= MOST_ENTRIES[package], shown


def test_files_are_short() -> None:
    lengths = {
        str(file): len((ROOT / file).read_text("utf-8").splitlines())
        for file in tracked("runtime", "exporter", "graphs", "tools")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
