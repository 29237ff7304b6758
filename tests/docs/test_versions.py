import re

import pytest

from docs.figures import versions as said
from docs.figures.store import stored
from sparseflash.backends.triton import versions
from sparseflash.backends.triton.versions import MEASURED, is_measured, named, triton_version
from tests.docs.pages import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_every_version_was_timed_beside_the_first():
    measured = stored()["triton-versions/h200"]
    assert {each.way for each in measured.measurements if "portable" not in each.way} == set(said.rows().values())
    for way in said.rows().values():
        assert len(measured.matching(f"{said.NAMES}/*/{way}")) >= 24, "twelve cases of `speed --quick`, two passes"


def test_pip_takes_the_oldest_and_refuses_no_newer_one():
    oldest = MEASURED[0]
    bounds = dict(
        re.findall(r"[\"'](torch|triton)([^\"';]*)", PYPROJECT.partition("dependencies = [")[2].split("]")[0])
    )
    assert bounds == {"torch": f">={oldest.torch[0]}", "triton": f">={named((oldest.triton,))}"}


@pytest.mark.parametrize("page", ["README.md", "docs/pages/faq.md", "docs/pages/tutorial.md"])
def test_a_page_first_says_the_oldest_pytorch(page):
    said_first = re.search(r"PyTorch (?:from )?(\d\.\d+)", (ROOT / page).read_text())[1]
    assert said_first == MEASURED[0].torch[0]


def test_the_versions_of_the_tests_are_measured_ones():
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert pinned in [torch for each in MEASURED for torch in each.torch]
    assert is_measured(triton_version())


def test_the_list_is_in_order():
    assert sorted(MEASURED) == list(MEASURED)


@pytest.mark.parametrize(("release", "version"), [("3.9.0", (3, 9)), ("3.10.1+git1234", (3, 10)), ("main", (0, 0))])
def test_versions_are_read(release, version, monkeypatch):
    monkeypatch.setattr(versions, "triton_release", lambda: release)
    assert triton_version() == version
