"""The documentation: short enough to be read, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "demo").rglob("*.md"))]
MOST_WORDS = 14_000  # what a reader gets through in an hour


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them: in lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"^(```|    ).*?$", "", page.read_text("utf-8"), flags=re.M)
    headings = [heading.strip().replace("`", "").lower() for heading in re.findall(r"^#+ (.*)$", text, flags=re.M)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_the_documentation_is_short() -> None:
    assert sum(len(page.read_text("utf-8").split()) for page in DOCS) <= MOST_WORDS
