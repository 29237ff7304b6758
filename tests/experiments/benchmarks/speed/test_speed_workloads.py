import pytest
import torch

from experiments.benchmarks.harness import Bench
from experiments.benchmarks.speed.cases import WORKLOADS
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.run import OURS, run_case
from experiments.measurements import Run

CPU = torch.device("cpu")
SMALL = {each.name: each.shrunk(256, 128) for each in WORKLOADS}
BY_KIND = {case.kind: case for case in reversed(SMALL.values())}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_a_mask_follows_its_rule(case):
    found = pattern(case)
    places = [torch.arange(n) for n in (case.batch, 1, case.length, case.k_len)]
    b, h, q, k = (x.view([-1 if axis == number else 1 for axis in range(4)]) for number, x in enumerate(places))
    assert found.mask.shape[2:] == (case.length, case.k_len)
    live = torch.ones_like(q + k, dtype=torch.bool) if found.rule is None else found.rule(b, h, q, k)
    assert torch.equal(*torch.broadcast_tensors(found.mask.to_dense(), live))


@pytest.mark.parametrize("name", [*(case.name for case in BY_KIND.values()), "deepseek-causal-8k"])
def test_ours_is_right_and_peers_are_told_what_they_cannot_serve(name, tmp_path):
    bench = Bench("speed", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)
    case = SMALL[name]
    assert run_case(bench, case, ["sdpa", "sparseflash-varlen"], 0, 1)
    found = {each.name.removeprefix(f"speed/{case.path}/"): each for each in bench.measurements}
    assert found[f"exactness/{OURS}"].value <= 1
    assert all(found[f"{which}/{OURS}"].value > 0 for which in case.passes)
    for which in case.passes:
        sdpa, varlen = found[f"{which}/sdpa"], found[f"{which}/sparseflash-varlen"]
        assert sdpa.value if case.kind in ("dense", "causal") else "dense and causal masks only" in sdpa.failure
        assert varlen.value if case.kind == "documents" else varlen.failure == "skipped: documents only"
