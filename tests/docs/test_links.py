import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|<img[^>]*\ssrc=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def prose(page):
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """Return the anchors of a page's headings, as GitHub names them (repeated headings apart)."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {text.replace(" ", "-") for text in kept}


def broken_links(page):
    broken = []
    for groups in _LINK.findall(prose(page)):
        link = "".join(groups)
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_figures_of_a_page_exist(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words!\n[a](page.md) [b](gone.md) ![c](gone.svg) [d](#two-words) [e](#three) [f](page.md#gone)\n"
        '[g](https://example.org) <img alt="h" src="gone.png">\n```\n[i](code.md)\n```\n'
    )
    assert broken_links(page) == ["gone.md", "gone.svg", "#three", "page.md#gone", "gone.png"]
