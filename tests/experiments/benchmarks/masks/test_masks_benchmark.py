import sys

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks import masks as benchmark
from experiments.measurements import read
from sparseflash import masks

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@needs_proc
def test_each_mask_has_its_seconds_memory_and_size(tmp_path):
    done = CliRunner().invoke(benchmark.app, ["--only", "varlen/10/", "--repeats", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    _, found = read(tmp_path / "masks.jsonl")
    of_name = {each.name: each for each in found}
    ways = ["documents", "causal", "dense", "window", "rule", "function", "butterfly"]
    assert list(of_name) == [f"masks/varlen/10/{what}/{way}" for way in ways for what in ("cpu", "peak", "size")]
    assert all(each.value >= 0 for each in found)
    assert of_name["masks/varlen/10/cpu/causal"].settings == of_name["masks/varlen/10/cpu/documents"].settings
    assert of_name["masks/varlen/10/size/window"].value == of_name["masks/varlen/10/size/rule"].value
    assert of_name["masks/varlen/10/cpu/rule"].spread is not None


@needs_proc
def test_memory_counts_above_the_start():
    ballast = torch.ones(1 << 25)
    found = benchmark.made(lambda: (torch.ones(1 << 24).sum(), masks.causal(100, block=16))[1], 8.0)
    assert ballast.nbytes > found.peak > 0.9 * (1 << 26)
    assert (found.size, found.tiles) == (masks.causal(100, block=16).nbytes, 28)


@needs_proc
def test_a_mask_that_cannot_be_made_says_why():
    def refused():
        raise ValueError("no")

    with pytest.raises(RuntimeError, match=r"more than 0.1 GB"):
        benchmark.made(lambda: torch.ones(1 << 28), 0.1)
    with pytest.raises(RuntimeError, match="the process ended with 1"):
        benchmark.made(refused, 1.0)


def test_the_cases_are_named_once_and_hold_every_pattern():
    names = [(each.name, each.way) for each in benchmark.cases()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("million/") for name, _ in names) == sum(not p.chosen for p in benchmark.PATTERNS)
