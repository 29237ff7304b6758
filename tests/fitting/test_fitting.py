import json
from itertools import combinations
from pathlib import Path

import pytest

from tests.compiling.uninterpreted import python
from tests.fitting.cases import CHANGES, FACTORS, covering
from tests.fitting.fits import read
from tests.fitting.pairs import pairwise

STORED = sorted((Path(__file__).parents[2] / "experiments/results/compile").glob("fits-triton-*.csv"))
# Their kernels exceeded shared memory with the stages chosen for the tiles alone.
TOO_LARGE = {
    "a bias in fp32 and a function, H100": (
        'arch=90, arithmetic="float16", dims=(128, 128), block=128, tokens=128, lengths=True, pairs="bias fp32", '
        'function="scores", sink=True, learned=True'
    ),
    "a bias in fp32 and a function that reads tables, A100": (
        'arch=80, arithmetic="float16", dims=(32, 32), block=128, pairs="bias fp32", function="tables"'
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LARGE.values(), ids=TOO_LARGE)
def test_stages_that_do_not_fit_beside_the_numbers_of_scores_are_left_out(case):
    source = (
        "import json\n"
        "from dataclasses import asdict\n"
        "from tests.fitting.cases import OWN_TILES, PLAIN, Case\n"
        "from tests.fitting.fits import fits_of\n"
        f"case = Case(**OWN_TILES | PLAIN | dict({case}))\n"
        "fits = fits_of(case)\n"
        "print(json.dumps([{**asdict(fit), 'fits': fit.fits, 'fewer': fit.has_fewer_stages} for fit in fits]))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {fit["kernel"] for fit in found} == {"forward", "dq", "dk_dv"}
    assert all(fit["fits"] for fit in found), found
    assert any(fit["fewer"] for fit in found), "a case whose kernels all fit as they are shows nothing"
    assert not all(fit["fewer"] for fit in found), found


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_is_stored_fits_and_is_of_the_drawn_cases(path):
    fits = read(path)
    assert [fit for fit in fits if not fit.fits] == []
    assert {fit.arch for fit in fits} == set(FACTORS["arch"])
    assert any(fit.has_fewer_stages for fit in fits), "cases whose kernels all fit as they are show nothing"
    assert {fit.case for fit in fits} <= {str(case) for changes in CHANGES for case in covering(changes)}


def test_a_covering_array_has_every_possible_pair_of_values():
    factors = {"a": (0, 1, 2), "b": "xyz", "c": (True, False), "d": (0.0, 0.5, 1.5, 2.5)}

    def possible(case):
        return not (case.get("a") == 2 and case.get("d") == 0.0)

    cases = pairwise(factors, seed=3, possible=possible)
    assert all(map(possible, cases)) and cases == pairwise(factors, seed=3, possible=possible)
    for one, other in combinations(factors, 2):
        wanted = {(x, y) for x in factors[one] for y in factors[other] if possible({one: x, other: y})}
        assert {(case[one], case[other]) for case in cases} == wanted
    assert len(cases) < 20


def test_a_covering_array_says_where_no_value_is_possible():
    with pytest.raises(ValueError, match=r"possible must leave b a value beside every case; got none beside \{'a': 0"):
        pairwise({"a": (0,), "b": (1,), "c": (2,)}, possible=lambda case: len(case) < 3 and case.get("b") != 1)


def test_changes_that_are_not_drawn_are_refused():
    done = python("-m", "tests.fitting", "--changes", "all")
    assert done.returncode == 2 and "invalid choice: 'all' (choose from" in done.stderr
