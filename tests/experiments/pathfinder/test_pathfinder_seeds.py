import pytest

from experiments.pathfinder.seeds import (
    FIRST_TRAINING_SEED,
    MOST_EARLIER,
    RUNS,
    TEST_SEED,
    VALIDATION_SEED,
    image_index,
    training_seed,
)


def test_no_training_seed_is_one_of_the_test_or_validation():
    assert len({TEST_SEED, VALIDATION_SEED, training_seed(0), training_seed(1)}) == 4
    assert training_seed(0) == FIRST_TRAINING_SEED > VALIDATION_SEED
    with pytest.raises(ValueError, match="seed must be from 0"):
        training_seed(-1)
    seeds = {training_seed(seed, earlier) for seed in (0, 1, RUNS - 1) for earlier in range(MOST_EARLIER + 1)}
    assert len(seeds) == 21
    assert FIRST_TRAINING_SEED <= min(seeds) < max(seeds) < 2**63
    with pytest.raises(ValueError, match="weights to begin with must have at most 6 runs behind them; got 7"):
        training_seed(0, MOST_EARLIER + 1)


def test_every_place_of_every_step_has_an_index_of_its_own():
    found = {image_index(stage, step, place) for stage in range(3) for step in (0, 1, 7) for place in (0, 1, 65535)}
    assert len(found) == 27
    with pytest.raises(ValueError, match="at most 65536 images"):
        image_index(0, 0, 65536)
