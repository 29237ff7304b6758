"""The README's examples run, as they stand and in their order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def examples():
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_every_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    found = examples()
    assert len(found) >= 3
    for number, source in enumerate(found):
        exec(compile(source, f"README example {number}", "exec"), names)
    assert "BlockMask(4096 x 4096, blocks of 128, 192 tiles" in capsys.readouterr().out


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
def test_every_link_of_the_readme_leads_somewhere(path):
    assert (ROOT / path).exists()
