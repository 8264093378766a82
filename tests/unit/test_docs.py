"""The blocks of README and docs run, and print what is shown below them; the drawn table is the table in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import draw_life

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(match["code"], match["output"] or "", id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(BLOCK.finditer(page.read_text()))
]


def test_there_are_examples() -> None:
    assert sum(1 for page in PAGES if page.name == "README.md") == 1
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_example(code: str, output: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    # Nothing but the notice that kernels are compiled may come on standard error.
    errors = [line for line in ran.stderr.splitlines() if "compiling kernels" not in line]
    assert (ran.returncode, errors) == (0, [])
    assert ran.stdout == output


def test_life_page_is_drawn_from_the_table() -> None:
    assert draw_life.PAGE.read_text() == draw_life.draw()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
