from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.decode import SMALL, app, ways_of
from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.peers import flashinfer
from experiments.measurements import read
from tests.experiments.benchmarks.flashinfer_stand_in import PACKAGE

CPU = torch.device("cpu")


def test_every_way_to_store_the_cache_gives_what_sdpa_gives():
    ways = ways_of(SMALL[0], CPU, torch.float32)
    want = ways["contiguous/sdpa"].call()
    for name in ("contiguous", "pages-of-16", "pages-of-64"):
        torch.testing.assert_close(ways[f"{name}/sparseflash"].call(), want, rtol=1e-4, atol=1e-5)
    read = ways["contiguous/sparseflash"].settings["bytes"]
    assert read == 2 * 2 * 2 * 2 * 16 * 256
    assert ways["2-chosen-pages/sparseflash"].settings["bytes"] == read // 2


def test_the_command_records_every_way(tmp_path):
    found = CliRunner().invoke(app, ["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    run, measurements = read(tmp_path / "decode.jsonl")
    assert [each.name.removeprefix("decode/2x256-heads4of2-new1/") for each in measurements] == [
        "contiguous/sparseflash", "pages-of-16/sparseflash", "pages-of-64/sparseflash",
        "window-32-and-4-sinks/sparseflash", "2-chosen-pages/sparseflash", "contiguous/sdpa",
    ]  # fmt: skip
    assert all(each.value > 0 and each.settings["bytes"] > 0 for each in measurements)
    assert {"torch", "triton", "flash-attn-4", "flashinfer-python"} <= run.versions.keys()
    assert run.command.startswith("python -m experiments.benchmarks.decode")


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("page", [16, 64])
def test_flashinfer_gets_the_pages(monkeypatch, page, new):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    ways = ways_of(replace(SMALL[0], new=new), CPU, torch.float32)
    ours = ways[f"pages-of-{page}/sparseflash"].call
    found = flashinfer.decode_paged(*ours.args, **ours.keywords)()
    torch.testing.assert_close(found, ways["contiguous/sparseflash"].call(), rtol=1e-4, atol=1e-5)


def test_flashinfer_gets_a_contiguous_cache(monkeypatch):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    q, k, v = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 40, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(flashinfer.decode_contiguous(q, k, v)(), want)


def test_without_flashinfer_there_is_a_reason():
    with pytest.raises(Unavailable, match="flashinfer-python is not installed: "):
        flashinfer.load()
