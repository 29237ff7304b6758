"""The seeds of images: fresh images at every training step, and never a test image.

An image depends only on a seed and an index. Training, validation, test, and runs chained by --initial have different
seeds.
"""

from __future__ import annotations

TEST_SEED = 10**18
VALIDATION_SEED = 10**18 + 1
FIRST_TRAINING_SEED = 2 * 10**18
RUNS = 10**18  # with different seeds
MOST_EARLIER = 6  # of a chain; more would exceed 2^63

_STEPS_BITS, _IMAGES_BITS = 40, 16
MOST_IMAGES = 1 << _IMAGES_BITS  # images of a step


def training_seed(run_seed: int, earlier: int = 0) -> int:
    """earlier: runs that trained its initial weights.

    >>> len({training_seed(0), training_seed(1), training_seed(0, earlier=1), training_seed(1, earlier=1)})
    4
    """
    if not 0 <= run_seed < RUNS:
        raise ValueError(f"seed must be from 0 to {RUNS - 1}; got {run_seed}")
    if not 0 <= earlier <= MOST_EARLIER:
        raise ValueError(f"weights to begin with must have at most {MOST_EARLIER} runs behind them; got {earlier}")
    return FIRST_TRAINING_SEED + earlier * RUNS + run_seed


def image_index(stage: int, step: int, place: int) -> int:
    """Unique for each (stage, step, place).

    >>> len({image_index(stage, step, place) for stage in (0, 1) for step in (0, 1) for place in (0, 1)})
    8
    """
    if place >= MOST_IMAGES or step >= 1 << _STEPS_BITS:
        raise ValueError(f"a step has at most {MOST_IMAGES} images, a stage 2^{_STEPS_BITS} steps; got {place}, {step}")
    return (stage << _STEPS_BITS | step) << _IMAGES_BITS | place
