"""The benchmark of decoding measures calls that agree where they must."""

import json

import torch
from typer.testing import CliRunner

from experiments.benchmarks.decode.cli import SMALL, app, table
from experiments.benchmarks.decode.measure import calls_of


def test_every_way_to_store_the_cache_gives_what_sdpa_gives():
    calls = calls_of(SMALL[0], torch.device("cpu"), torch.float32)
    want = calls["SDPA"][0]()
    for name in ("contiguous", "pages of 16", "pages of 64"):
        torch.testing.assert_close(calls[name][0](), want, rtol=1e-4, atol=1e-5)
    assert calls["contiguous"][1] == 2 * 2 * 2 * 2 * 16 * 256  # k and v, bytes, batch, key heads, dim, tokens
    assert calls["2 chosen pages"][1] == calls["contiguous"][1] // 2


def test_the_command_writes_a_table_and_numbers(tmp_path):
    found = CliRunner().invoke(app, ["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["ms"] > 0 for row in rows)
    assert (tmp_path / "decode.md").read_text() == table(rows) + "\n"


def test_a_missing_gpu_is_told(tmp_path):
    found = CliRunner().invoke(app, ["--device", "cuda:99", "--out", str(tmp_path / "none")])
    assert found.exit_code == 2 and "GPUs here; got the device 'cuda:99'" in found.output
    assert not (tmp_path / "none").exists()
