import json
import os
from typing import NamedTuple

import torch

from sparseflash.testing.comparison import compare_with_draws


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


NAMES = Results._fields


def assert_exact(got, truth, draws, factor, label, score_magnitude=0.0):
    """Every result of `got` is within its yardstick; `label` is for the record of a long run.

    `draws`: plain results and the truth of each draw, by name, as many as are needed; `factor`: of their errors.
    `score_magnitude`: the largest sum of absolute products in a score, the magnitude of lse.
    """
    recorded = os.environ.get("SPARSEFLASH_EXACTNESS")
    by_name = (dict(zip(NAMES, values, strict=True)) for values in (got, truth))
    magnitudes = {"lse": score_magnitude}
    enough = 0.5 if recorded else 1.0
    found = compare_with_draws(*by_name, draws, factor, magnitudes=magnitudes, enough=enough)
    if recorded:
        _record(recorded, label, found.ratios)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"


def _record(folder, label, ratios):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps({**label, **ratios}) + "\n")
