import dataclasses
import json

import pytest
import torch

from experiments.measurements import Measurement, Run, add_seed, current_run, ratio, read, write

RUN = Run("H200", "570.1", {"torch": "2.9"}, "abc123", "2026-11-29 10:00 UTC", "python -m x", 3, ("tuned.json",))
PEER, OURS = "speed/dense/64/forward/fa4", "speed/dense/64/forward/sparseflash"
FIGURES = [
    Measurement(PEER, 0.62, 0.02, "ms", {"lists": True}),
    Measurement(OURS, 0.31, 0.01, "ms"),
    Measurement("lra/listops/accuracy/sparseflash", 0.5, 0.1, "1", spread_of="seeds", seeds=5),
    Measurement("speed/dense/64/forward/sdpa", None, None, "ms", failure="RuntimeError: none"),
]


def test_reads_what_was_written(tmp_path):
    write(tmp_path / "deep" / "h200.jsonl", RUN, FIGURES)
    run, figures = read(tmp_path / "deep" / "h200.jsonl")
    assert (run, figures) == (RUN, FIGURES)
    assert all(figure.run == RUN for figure in figures)


def test_file_is_one_object_a_line_with_the_run_first(tmp_path):
    write(tmp_path / "h200.jsonl", RUN, FIGURES[:2])
    first, *rest = map(json.loads, (tmp_path / "h200.jsonl").read_text().splitlines())
    assert first == {"run": dataclasses.asdict(RUN) | {"helped": ["tuned.json"]}}
    assert rest == [
        {"name": PEER, "value": 0.62, "spread": 0.02, "unit": "ms", "settings": {"lists": True}},
        {"name": OURS, "value": 0.31, "spread": 0.01, "unit": "ms"},
    ]


def test_ratio_is_the_peers_value_over_ours():
    found = ratio(FIGURES, PEER, OURS)
    assert found == pytest.approx((2.0, 0.03))
    assert found.above_noise
    assert found.noise == pytest.approx(0.06)
    assert not ratio([dataclasses.replace(FIGURES[0], value=0.315), FIGURES[1]], PEER, OURS).above_noise
    assert not ratio([dataclasses.replace(FIGURES[0], spread=0.6), FIGURES[1]], PEER, OURS).above_noise


def test_a_ratio_of_unknown_noise_is_not_above_it():
    found = ratio([dataclasses.replace(FIGURES[0], spread=None), FIGURES[1]], PEER, OURS)
    assert found == (2.0, None) and not found.above_noise


def test_no_ratio_of_two_runs(tmp_path):
    write(tmp_path / "a.jsonl", RUN, FIGURES[:1])
    write(tmp_path / "b.jsonl", dataclasses.replace(RUN, date="2026-11-30 10:00 UTC"), FIGURES[1:2])
    both = read(tmp_path / "a.jsonl")[1] + read(tmp_path / "b.jsonl")[1]
    with pytest.raises(ValueError, match=r"a ratio must be of one run; got .* of 2026-11-29 .* of 2026-11-30"):
        ratio(both, PEER, OURS)
    with pytest.raises(ValueError, match=r"a ratio must be of one run; got .* a run not yet written"):
        ratio([both[0], FIGURES[1]], PEER, OURS)


@pytest.mark.parametrize(
    ("figures", "peer", "message"),
    [
        (FIGURES, "speed/dense/64/forward/flex", "got speed/dense/64/forward/flex, which is not there"),
        (FIGURES + FIGURES[:1], PEER, "measured 2 times"),
        (FIGURES, "lra/listops/accuracy/sparseflash", "one unit; got lra/listops/accuracy/sparseflash in 1"),
        (FIGURES, "speed/dense/64/forward/sdpa", "of measured values; got speed/.*, which failed: RuntimeError: none"),
    ],
)
def test_ratio_refuses_what_cannot_be_compared(figures, peer, message):
    with pytest.raises(ValueError, match=message):
        ratio(figures, peer, OURS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "speed"}, "must be BENCHMARK/CASE.../WAY; got 'speed'"),
        ({"name": "speed//ours"}, "must be BENCHMARK/CASE.../WAY"),
        ({"value": float("nan")}, "value of .* must be finite; got nan"),
        ({"spread": float("inf")}, "spread of .* must be finite; got inf"),
        ({"value": None}, "must have either a value or a failure"),
        ({"failure": "late"}, "must have either a value or a failure"),
        ({"spread_of": "days"}, "spread_of must be one of turns, seeds; got 'days'"),
        ({"seeds": 3}, "seeds must be given with spread_of='seeds' and only then; got 3"),
        ({"spread_of": "seeds"}, "seeds must be given .* got None"),
    ],
)
def test_measurement_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FIGURES[1], **change)


def test_write_refuses_a_name_twice_and_figures_of_another_run(tmp_path):
    path = tmp_path / "h200.jsonl"
    with pytest.raises(ValueError, match=f"each name must occur once in h200.jsonl; got {OURS} again"):
        write(path, RUN, [FIGURES[1], FIGURES[1]])
    write(path, RUN, FIGURES)
    with pytest.raises(ValueError, match="must be of the run that is written; got one of 2026-11-29 10:00 UTC on H200"):
        write(path, dataclasses.replace(RUN, commit="def"), read(path)[1])


def test_read_refuses_a_file_that_is_not_one_run(tmp_path):
    path = tmp_path / "h200.jsonl"
    write(path, RUN, FIGURES)
    text = path.read_text()
    path.write_text(text + text)
    with pytest.raises(ValueError, match=r"h200.jsonl must hold one run; got more than one"):
        read(path)
    path.write_text(text.partition("\n")[2])
    with pytest.raises(ValueError, match=r'the first line of h200.jsonl must be {"run": ...}'):
        read(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"the first line of h200.jsonl must be"):
        read(path)


def test_current_run_says_where_and_how():
    run = current_run(torch.device("cpu"), "python -m x", commit="abc", seed=1, helped=("a",), packages=("pytest",))
    assert (run.device, run.driver, run.commit, run.command, run.seed, run.helped) == (
        "CPU", "-", "abc", "python -m x", 1, ("a",)
    )  # fmt: skip
    assert run.versions["torch"] == torch.__version__
    assert run.versions["pytest"] == pytest.__version__
    assert {"python", "triton", "cuDNN", "sparseflash", "flash-attn-4"} <= set(run.versions)
    assert run.date.endswith("UTC")


def seeds_of(path, *pairs, **changes):
    for seed, value in pairs:
        found = Measurement("recall/256/right-answers/dense", value, None, "%", {"tokens": 256})
        every = add_seed(path, dataclasses.replace(RUN, seed=seed, **changes), [found])
    return every


def test_a_file_of_seeds_has_their_mean_and_deviation(tmp_path):
    values = {0: 98.85, 1: 98.675, 2: 98.195, 3: 98.765, 4: 97.515}
    one = seeds_of(tmp_path / "cpu.jsonl", (0, 98.85))
    assert [(each.value, each.spread, each.spread_of) for each in one] == [(98.85, None, "turns")]
    assert read(tmp_path / "cpu.jsonl")[0].seed == 0
    seeds_of(tmp_path / "cpu.jsonl", *list(values.items())[1:])
    run, (found,) = read(tmp_path / "cpu.jsonl")
    assert found.value == pytest.approx(98.4) and found.spread == pytest.approx(0.0056507, rel=1e-4)
    assert (found.spread_of, found.seeds, run.seed) == ("seeds", 5, None)
    assert found.settings == {"tokens": 256, "runs": list(values.values()), "run_seeds": [0, 1, 2, 3, 4]}


def test_a_seed_is_added_once_and_only_to_runs_of_its_kind(tmp_path):
    seeds_of(tmp_path / "cpu.jsonl", (0, 1.0))
    with pytest.raises(ValueError, match="each seed must be added once; recall/256/right-answers/dense has seed 0"):
        seeds_of(tmp_path / "cpu.jsonl", (0, 1.0))
    with pytest.raises(ValueError, match="must be of its commit, abc123; got def456: write another file"):
        seeds_of(tmp_path / "cpu.jsonl", (1, 1.0), commit="def456")
    with pytest.raises(ValueError, match="a run that is added to others must have a seed; got None"):
        seeds_of(tmp_path / "cpu.jsonl", (None, 1.0))


def test_ways_of_several_commands_lie_in_one_file(tmp_path):
    seeds_of(tmp_path / "cpu.jsonl", (0, 1.0))
    other = Measurement("recall/256/right-answers/nsa", 0.5, None, "%")
    add_seed(tmp_path / "cpu.jsonl", dataclasses.replace(RUN, seed=0, command="python -m x --way nsa"), [other])
    run, found = read(tmp_path / "cpu.jsonl")
    assert [each.way for each in found] == ["dense", "nsa"] and run.seed == 0
    assert run.command == "python -m x; python -m x --way nsa"
