"""The benchmark of decoding measures calls that agree where they must."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.decode import measure as measure_module
from experiments.benchmarks.decode.cli import SMALL, app, table
from experiments.benchmarks.decode.measure import Call, calls_of
from experiments.benchmarks.speed.peers import flashinfer
from experiments.benchmarks.speed.peers.runner import Unavailable
from tests.experiments.benchmarks.flashinfer_stand_in import PACKAGE


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
    stored = json.loads((tmp_path / "decode.json").read_text())
    rows = stored["rows"]
    assert len(rows) == 6 and all(row["ms"] > 0 for row in rows)
    assert {"device", "torch", "triton", "flash-attn-4", "flashinfer", "commit", "command"} <= stored.keys()
    about, _, written = (tmp_path / "decode.md").read_text().partition("\n\n")
    assert f"commit {stored['commit']}, command python -m experiments.benchmarks.decode" in about
    assert written == table(rows) + "\n"


def test_a_missing_gpu_is_told(tmp_path):
    found = CliRunner().invoke(app, ["--device", "cuda:99", "--out", str(tmp_path / "none")])
    assert found.exit_code == 2 and "GPUs here; got the device 'cuda:99'" in found.output
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("page", [16, 64])
def test_flashinfer_gets_the_pages(monkeypatch, page, new):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    calls = calls_of(replace(SMALL[0], new=new), torch.device("cpu"), torch.float32)
    ours = calls[f"pages of {page}"].run
    found = flashinfer.decode_paged(*ours.args, **ours.keywords)()
    torch.testing.assert_close(found, calls["contiguous"].run(), rtol=1e-4, atol=1e-5)


def test_flashinfer_gets_a_contiguous_cache(monkeypatch):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    q, k, v = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 40, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(flashinfer.decode_contiguous(q, k, v)(), want)


def test_without_flashinfer_there_is_a_reason():
    with pytest.raises(Unavailable, match="flashinfer-python is not installed: "):
        flashinfer.load()


def test_a_peer_that_cannot_or_does_not_agree_is_not_timed(monkeypatch):
    calls = calls_of(SMALL[0], torch.device("cpu"), torch.float32)

    def refuses():
        raise Unavailable("no such pages")

    calls["other"] = Call(lambda: calls["SDPA"].run() * 1.1, 1, is_peer=True)
    calls["refuses"] = Call(refuses, 1, is_peer=True)
    monkeypatch.setattr(measure_module, "calls_of", lambda *given: calls)
    rows = measure_module.measure(SMALL[0], torch.device("cpu"), round_ms=0.0)
    assert [row["call"] for row in rows if "ms" in row] == [name for name in calls if name not in ("other", "refuses")]
    assert [row["error"] for row in rows[-2:]] == [
        "FAILED: ValueError: differs from ours by 0.1, relative", "skipped: no such pages"
    ]  # fmt: skip
    assert table(rows).endswith("| refuses | skipped: no such pages | |")
