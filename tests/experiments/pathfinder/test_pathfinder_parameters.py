import pytest

from experiments.pathfinder.parameters import FOLDS, LRA, lra, parameters_of
from experiments.pathfinder.testset import title


def test_the_arenas_parameters_are_unchanged_and_others_have_names_of_their_own():
    for size in LRA:
        for contour in FOLDS:
            assert parameters_of(size, contour) == lra(size, contour)
    others = [parameters_of(512, 14), parameters_of(512, 9), parameters_of(64, 3), parameters_of(128, 3)]
    assert not any(each.is_lra for each in others) and len({each.name for each in others}) == 4
    assert parameters_of(64, 2).distractor_length == 1 and parameters_of(64, 12).distractor_length == 4
    assert title(512, 14) == "extrapolated Path-512"


@pytest.mark.parametrize(("size", "contour"), [(48, 14), (64, 1), (64, 15)])
def test_other_sizes_and_lengths_are_refused(size, contour):
    with pytest.raises(ValueError, match=f"got {size} with {contour}"):
        parameters_of(size, contour)
