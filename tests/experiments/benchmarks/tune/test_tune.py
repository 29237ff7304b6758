import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks import tune
from experiments.benchmarks.harness import Bench
from experiments.benchmarks.tune import (
    ARITHMETICS,
    DIMS,
    KERNELS,
    Candidates,
    Compiled,
    Target,
    app,
    candidates,
    measure,
)
from experiments.measurements import Run
from sparseflash.backends.triton import configs
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.portable.forward_pass import Forward
from tests.compiling.uninterpreted import python

TABLES = {
    (8, 0): "_AMPERE",
    (8, 6): "_CONSUMER",
    (9, 0): "_HOPPER_COPYING" if configs._COPYING else "_HOPPER",
    (10, 0): "_BLACKWELL",
    (10, 3): "_BLACKWELL",
    (12, 0): "_CONSUMER",
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_there_are_candidates_for_every_entry_and_each_once(kernel, arithmetic, dim):
    found = candidates(Target(kernel, arithmetic, dim, False))
    assert 5 <= len(found) == len(set(found))


def test_what_is_shipped_for_hopper_at_head_dim_64_is_among_the_candidates():
    for kernel in KERNELS:
        target = Target(kernel, "half", 64, True)
        entry = kernel, "half", 64
        assert {configs._HOPPER[entry], configs._HOPPER_COPYING[entry]} <= set(candidates(target))


@pytest.mark.parametrize(("capability", "name"), TABLES.items(), ids=str)
def test_the_table_of_an_architecture(capability, name):
    tables = architecture_of(capability).tables
    assert tables.of(True) is getattr(configs, name)
    pointers = {(9, 0): configs._HOPPER_POINTERS, (10, 0): configs._BLACKWELL_POINTERS}
    assert tables.of(False) is pointers.get(capability, tables.of(False))


def test_a_candidate_that_spills_or_asks_for_too_much_memory_is_dropped():
    script = (
        "import json; from experiments.benchmarks.tune import Config, Target, compiled\n"
        "target = Target('dq', 'half', 64, True)\n"
        "asked = [(Config(64, 64, 4, 2), 232448), (Config(128, 128, 4, 1), 232448), (Config(64, 64, 4, 2), 40000)]\n"
        "asked.append((Config(128, 128, 4, 1), 232448, True))\n"
        "found = [compiled(config, target, 90, *options).why for config, *options in asked]\n"
        "limited = Config(64, 64, 4, 3, 168), Target('dk_dv', 'half', 64, True), 90, 232448\n"
        "print(json.dumps([*found, compiled(*limited).why]))"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    good, spills, large, asked_for, limited = json.loads(done.stdout)
    assert good == ""
    assert spills.startswith("spills ")
    assert large.endswith("bytes of shared memory")
    assert asked_for == ""
    assert limited == ""


@pytest.mark.parametrize(("kernel", "arithmetic"), [("forward", "half"), ("dk_dv", "half"), ("dq", "fp32")])
def test_candidates_are_timed_beside_the_shipped_and_checked(kernel, arithmetic):
    bench = Candidates(Target(kernel, arithmetic, 32, False), 64, torch.device("cpu"), kinds=("causal",))
    tried = [Config(16, 32, 1, 1), Config(32, 16, 1, 1)]
    measured = bench.ratios(tried, rounds=1, round_ms=0.0)
    assert measured.keys() == set(tried)
    first, second = measured.values()
    assert first.keys() == second.keys() == {"causal"} and 0 < first["causal"] <= second["causal"]
    assert 0 <= bench.error(tried[0]) <= 1


def test_times_over_the_shipped_configuration_are_recorded_and_the_fastest_is_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "CHECKED", 1)
    bench = Bench("tune", Run("CPU", "", {}, "", "", ""), tmp_path, torch.device("cpu"), rounds=1)
    target = Target("forward", "half", 32, False)
    tried = [Compiled(config, {}, "") for config in (Config(16, 32, 1, 1), Config(32, 16, 1, 1))]
    measure(bench, target, [*tried, Compiled(Config(64, 64, 4, 1), {}, "spills 8 bytes")], ("causal",), 64)
    dropped, first, second = bench.measurements
    assert (dropped.name, dropped.failure) == ("tune/forward/half/32/64x64x4x1-pointers", "spills 8 bytes")
    names = {f"tune/forward/half/32/{each.config}-pointers" for each in tried}
    assert {first.name, second.name} == names and 0 < first.value <= second.value
    assert first.settings["ratios"] == {"causal": pytest.approx(first.value)}
    assert 0 <= first.settings["error"] <= 1 and "error" not in second.settings


def test_a_wrong_kernel_has_an_error_above_one(monkeypatch):
    bench = Candidates(Target("forward", "half", 32, False), 64, torch.device("cpu"), kinds=("causal",))
    forward = Forward.__call__

    def wrong(self, *tensors):
        out, lse, kept = forward(self, *tensors)
        return out.mul_(1.01), lse, kept

    monkeypatch.setattr(Forward, "__call__", wrong)
    assert bench.error(Config(32, 32, 1, 1)) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "dv"), "--kernel must be from forward, dk_dv, dq"),
        (("--dim", "48"), "--dim must be from 32, 64, 128, 256"),
        (("--mask", "dense", "--mask", "square"), "--mask must be from dense, causal"),
        (("--config", "64x128"), "--config must be as 64x128x8x2, 64x64x4x3x168 or 64x64x4x3q; got '64x128'"),
        (("--config", "64x96x4x2"), "--config must have powers of two as tiles and warps; got '64x96x4x2'"),
    ],
)
def test_options_that_cannot_be_served_are_explained(arguments, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # put back after the test
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_the_command_starts_as_a_program():
    done = python("-m", "experiments.benchmarks.tune", "--kernel", "dv")
    assert done.returncode == 2
    assert "--kernel must be from" in done.stderr
