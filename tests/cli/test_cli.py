import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import sparse
from typer.testing import CliRunner

import sparseflash
from sparseflash import BlockMask, __version__, analysis, attention, interop, masks
from sparseflash import cli as command_line
from sparseflash.cli import bench, certificate, convert, expression, info, mask_mods, output
from sparseflash.cli.app import app
from sparseflash.cli.expression import mask_of
from sparseflash.cli.inputs import drawn
from sparseflash.cli.mask_mods import mask_mod_of
from sparseflash.cli.options import pattern_names, patterns_beginning_with
from sparseflash.cli.refused import Refused
from sparseflash.cli.sources import module_of
from sparseflash.cli.strip import strip
from sparseflash.explain import Explanation
from tests.processes.forked import ROOT, python
from tests.processes.threads import threads

CPU = ("--device", "cpu")
OWN = """
import torch
from sparseflash import BlockMask, masks

def beacons(q_len, *, block=32):
    lights = BlockMask.from_function(lambda q, k: k % 97 == 0, q_len, block=block)
    return masks.local(q_len, window=64, block=block) | lights

def broken(q_len):
    raise ValueError("my own mistake")

def nothing(q_len):
    return q_len

def rule(q, k):
    return k <= q

def dense(n):
    return torch.ones(n, n).bool()

def branches(n):
    def live(q, k):
        if k > q:
            return False
        return True
    return BlockMask.from_function(live, n)
"""


def run(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def unwrapped(output):
    return " ".join(output.split())


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_patterns.py"
    path.write_text(OWN)
    return str(path)


def test_a_mask_is_an_expression_a_file_or_a_function_of_ones_own(tmp_path, own, monkeypatch):
    both = masks.local(512, window=128) | masks.butterfly(512, block=128)
    assert mask_of("local(512, window=128) | butterfly(512, block=128)") == both
    assert mask_of("masks.per_head([local(512, window=128), causal(512)]).select(heads=1)") == masks.causal(512)
    both.save(tmp_path / "both.mask")
    assert mask_of(str(tmp_path / "both.mask")) == both
    assert mask_of("beacons(200)", [own]).to_dense()[0, 0, 150, 97]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mask_of("beacons(200)", ["own_patterns"]) == mask_of("beacons(200)", [own])


def test_a_file_of_ones_own_may_be_called_as_a_module_is(tmp_path):
    (tmp_path / "fractions.py").write_text(OWN)
    sys.modules.pop("fractions", None)
    assert mask_of("beacons(100)", [str(tmp_path / "fractions.py")]).q_len == 100
    import fractions

    assert fractions.Fraction(1, 2) == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("butterly(512)", r"no pattern is called butterly; did you mean butterfly"),
        (
            "sliding_window(512, 64)",
            r"no pattern is called sliding_window; use masks\.local\(n, window=w, causal=True\)",
        ),
        (
            "zzz(512)",
            r"no pattern is called zzz; there are a_shape, .*axial.*\. For a function of yours: --from FILE\.py",
        ),
        ("nowhere.npz", r"there is no file nowhere\.npz"),
        ("some/folder/nowhere", r"there is no file some/folder/nowhere"),
        ("/no where/it is.mask", r"there is no file /no where/it is\.mask"),
        ("local", r"local must be called, as local\(q_len, k_len=None, \*, window=None, .*block=128\), in quotes$"),
        ("3 + 4", r"3 \+ 4 must give a BlockMask; got int"),
        (
            "local(512",
            r"the mask must be an expression such as local\(4096, window=512\), or a file; got 'local\(512' \(.*never",
        ),
        ("local(512, window=128, wide=True)", r"local\(512, window=128, wide=True\): .*wide"),
        ("local(512, window=128, block=100)", r"block"),
        ("local(512, window=128) | butterfly(256)", r"512.*256"),
        ("masks.loca(512)", r"masks\.loca\(512\): .*loca"),
        ("butterfly.mask", r"butterfly\.mask: .*mask"),
        ("BlockMask.load('nope')", r"nope"),
        ("torch.arange", r"torch\.arange must give a BlockMask"),
        (" | ".join(["local(64, window=8)"] * 40) + " | 3", r"local\(64, window=8\) .*: "),
    ],
)
def test_what_is_no_mask_is_told_in_a_line(text, words):
    with pytest.raises(Refused, match=words):
        mask_of(text)
    output = run("show", text, code=2)
    assert output.startswith("Error: ") and "Traceback" not in output


def test_errors_in_ones_own_code_are_left_as_they_are(own):
    with pytest.raises(ValueError, match="my own mistake") as caught:
        mask_of("broken(512)", [own])
    assert not isinstance(caught.value, Refused)
    with pytest.raises(Refused, match=r"nothing\(512\) must give a BlockMask; got int"):
        mask_of("nothing(512)", [own])
    with pytest.raises(Refused, match=r"no pattern is called beacon; did you mean beacons\? The files of --from have "):
        mask_of("beacon(512)", [own])
    with pytest.raises(Refused, match=r"The files of --from have beacons, branches, broken, dense, nothing, rule\.$"):
        mask_of("zzz(512)", [own])
    with pytest.raises(Refused, match=r"there is no file .*missing.py"):
        mask_of("nothing(512)", ["missing.py"])
    for source in ("missing", "./missing", ""):
        with pytest.raises(Refused, match=f"there is no module {source}; a Python file ends with .py"):
            mask_of("nothing(512)", [source])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "rule",
            r"rule must give a BlockMask; got a function of \(q, k\)\. .* by 'BlockMask\.from_function\(rule, 4096\)'",
        ),
        ("rule(256)", r"rule\(256\): rule\(\) missing 1 .* 'k'\. A rule on positions becomes a mask by 'BlockMask"),
        ("beacons", r"beacons must be called, as beacons\(q_len, \*, block=32\), in quotes$"),
        ("dense(64)", r"dense\(64\) must give a BlockMask; got Tensor \(BlockMask\.from_dense takes boolean tensors"),
    ],
)
def test_what_ones_own_file_must_give_is_told_in_a_line(own, text, words):
    with pytest.raises(Refused, match=words):
        mask_of(text, [own])


def test_a_python_file_is_no_mask(own):
    said = run("show", own, code=2)
    assert said.startswith("Error: ") and f"'function(4096)' --from {own}" in said


@pytest.mark.parametrize("contents", [b"def broken(:\n", b"x = 1\x00\n", b"\xff\xfe = 1\n"])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_file_of_ones_own_that_is_no_python_is_told_in_a_line(contents, as_module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"no_python_{len(contents)}"
    (tmp_path / f"{name}.py").write_bytes(contents)
    source = name if as_module else f"{name}.py"
    said = run("show", "causal(64)", "--from", source, code=2)
    assert said.startswith(f"Error: {source} must be Python source; got ") and len(said.splitlines()) == 1


def test_a_module_may_be_made_by_its_package_or_be_imported_already(tmp_path, monkeypatch):
    (tmp_path / "own_package.py").write_text(
        "import sys, types\nsys.modules['own_package.part'] = types.ModuleType('own_package.part')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert module_of("own_package.part").__name__ == "own_package.part"
    assert module_of("__main__") is sys.modules["__main__"]


def test_an_error_in_what_ones_own_module_imports_is_shown_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "own_broken.py").write_text("def broken(:\n")
    (tmp_path / "own_importer.py").write_text("import own_broken\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SyntaxError):
        module_of("own_importer")


def test_the_way_to_an_error_in_ones_own_code_begins_at_the_expression(own):
    said = run("show", "branches(256)", "--from", own, code=1)
    assert "typer" not in said and 'File "<mask>", line 1' in said and "if k > q:" in said
    assert "TypeError: live must answer for many pairs at once." in said.splitlines()[-1]


def test_ones_own_code_may_lie_beside_the_library(tmp_path, monkeypatch):
    """Folders are compared, not the beginnings of their names; through links, too."""
    library = Path(masks.__file__).resolve().parents[1] / "sparseflash"
    assert not str(tmp_path).startswith(str(library))
    own = tmp_path / "sparseflash_own.py"
    own.write_text(OWN)
    (tmp_path / "sparseflash").mkdir()
    monkeypatch.setattr(expression, "_PACKAGE", tmp_path / "sparseflash")
    with pytest.raises(ValueError, match="my own mistake") as caught:
        mask_of("broken(512)", [str(own)])
    assert not isinstance(caught.value, Refused)


def test_show_says_what_analysis_says(tmp_path):
    mask = masks.local(1024, window=256) & masks.causal(1024)
    picture, kept = tmp_path / "mask.png", tmp_path / "mask.mask"
    output = run(
        "show", "local(1024, window=256) & causal(1024)", "--heads", "8", "--head-dim", "128", "--width", "8",
        "--causal", "--picture", str(picture), "--save", str(kept),
    )  # fmt: skip
    for words in (
        analysis.density(mask),
        analysis.flops(mask, 128, heads=8),
        analysis.flops(mask, 128, heads=8, backward=True),
        analysis.bytes_moved(mask, 128, heads=8),
        analysis.balance(mask)[0].rows,
        analysis.balance(mask)[0].columns,
        *analysis.coarsening(mask),
        *analysis.lint(mask, causal=True),
    ):
        assert str(words) in unwrapped(output)
    assert f"every earlier token after {analysis.layers_to_full_reach(mask, causal=True)} layers" in output
    assert mask.to_string(8) in output
    assert picture.stat().st_size > 1000 and BlockMask.load(kept) == mask


def test_show_finds_what_is_wrong_with_a_mask():
    assert "future-leak" not in run("show", "local(256, window=64)")
    hint = "no number of layers lets every token see every other token; --causal asks about earlier tokens only"
    assert hint in unwrapped(run("show", "chunked(256, chunk=64)"))
    assert "only for masks with as many queries as keys" in run("show", "causal(1, 256)", "--width", "0")


def test_show_of_a_mask_that_is_not_causal_as_it_must_be_ends_with_one(tmp_path):
    leaky, kept = ("show", "local(256, window=64)", "--causal"), tmp_path / "leaky.mask"
    assert "future-leak" in run(*leaky, "--save", str(kept), code=1) and kept.exists()
    shown = json.loads(run(*leaky, "--json", code=1))
    assert [each["code"] for each in shown["findings"] if each["severity"] == "error"] == ["future-leak"]
    assert "warning [never-connects]" in run("show", "chunked(256, chunk=64) & causal(256)", "--causal")


def test_show_says_what_reach_cannot_be_of():
    padded = "BlockMask.dense(64, block=16).with_lengths(q_lengths=[30], k_lengths=[50])"
    output = unwrapped(run("show", padded, "--width", "0"))
    assert "reach masks must have one length for queries and keys" in output and "note" not in output
    long = unwrapped(run("show", "chunked(2**19 + 1, chunk=16, block=16)", "--width", "0"))
    assert "reach masks must have at most 32768 block rows; got 32769 of 16 tokens." in long


def test_show_of_heads_with_patterns_of_their_own():
    output = run("show", "masks.per_head([local(256, window=64), causal(256)])", "--heads", "8")
    assert "block rows of pattern 0" in output and "block columns of pattern 1" in output
    mask = masks.per_head([masks.local(256, window=64), masks.causal(256)])
    assert str(analysis.flops(mask, 64)) in unwrapped(output)  # its own number of heads, not eight


RAGGED = masks.per_head([masks.local(200, window=60, block=32), masks.causal(200, block=32)])
WHOLE = BlockMask.from_layout(torch.eye(3, dtype=torch.bool), block=128)
HOLES = BlockMask.from_function(lambda q, k: (q % 5 > 0) & (k % 7 > 0) & (q // 40 == k // 40), 200, block=32)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (masks.butterfly(256, block=32), {}),
        (masks.causal(100, 170, block=32), {"head_dim": 16}),
        (RAGGED, {"kv_heads": 1}),
        (HOLES, {"heads": 1}),
        (masks.causal(200, block=32).with_lengths([150, 0, 200]), {}),
        (masks.local(200, window=60, block=32), {"dtype": "bf16"}),
        (masks.causal(2), {"head_dim": 16, "seed": 33}),
    ],
)
def test_attention_is_exact_by_its_yardstick(mask, options):
    heads = max(mask.shape[1], options.get("heads", 2))
    chosen = {"dtype": "fp32", "head_dim": 32, "heads": heads, "kv_heads": heads, "seed": 0, **options}
    errors = certificate.errors_of(mask, certificate.Case(**chosen))
    assert list(errors) == ["out", "lse", "dq", "dk", "dv"]
    assert all(0 <= error <= 1 for error in errors.values()) and max(errors.values()) > 0


def test_check_tells_errors_and_ends_with_one_where_attention_is_wrong(monkeypatch):
    output = run("check", "local(100, window=30, block=32)", "--dtype", "fp32,bf16", "--head-dim", "16", *CPU)
    assert re.search(r"fp32 │ +0\.\d\d │", output) and "bf16" in output and "Exact: no error" in output

    def wrong(*inputs, return_lse, backend):
        out, lse = right(*inputs, return_lse=True, backend=backend)
        return (out if backend == "reference" else out * 1.001), lse

    right = certificate.attention
    monkeypatch.setattr(certificate, "attention", wrong)
    assert "Not exact" in run("check", "local(100, window=30, block=32)", "--head-dim", "16", *CPU, code=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-heads", "3"), "--kv-heads must divide the 2 heads; got 3"),
        (("--dtype", "fp8"), "--dtype must be of bf16, fp16, fp32; got 'fp8'"),
        (("--dtype", ""), "--dtype must be of bf16, fp16, fp32; got ''"),
        (("--device", "nowhere"), "--device must be cpu or cuda, such as cuda:1; got nowhere"),
        (("--device", "xpu"), "--device must be cpu or cuda, such as cuda:1; got xpu"),
    ],
)
def test_check_refuses_what_it_cannot_do(options, words):
    device = () if "--device" in options else CPU
    output = run("check", "local(100, window=30, block=32)", *options, *device, code=2)
    assert "Error: " in output and words in output


def test_the_backend_is_the_one_that_is_named():
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    quick = ("check", "local(100, window=30, block=32)", "--head-dim", "16", "--backend", "triton", *CPU)
    output = run(*quick, code=0 if interpreted else 2)
    assert ("Exact: no error" if interpreted else "TRITON_INTERPRET=1") in output


def test_bench_gives_times_beside_dense_attention():
    output = run(
        "bench", "local(100, window=30, block=32)", "--heads", "2", "--head-dim", "16", "--seconds", "0.01", *CPU
    )
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in output.splitlines() if line.count("│") > 3}
    assert list(rows) == [bench.OURS, bench.DENSE, bench.PEERS["sdpa"], bench.PEERS["sdpa-mask"]]
    numbers = {name: [float(cell) for cell in row] for name, row in rows.items()}
    for forward, to_ours, both, both_to_ours in numbers.values():
        assert forward > 0 and both > 0
        # A pause of the machine may lengthen any time.
        assert to_ours == pytest.approx(forward / numbers[bench.OURS][0], rel=0.1, abs=0.01)
        assert both_to_ours == pytest.approx(both / numbers[bench.OURS][2], rel=0.1, abs=0.01)
    assert "On a CPU sparseflash saves memory; it is not made for speed there." in output


def test_bench_on_a_cpu_says_that_threads_wait_for_one_another():
    quick = ("bench", "causal(32)", "--heads", "1", "--head-dim", "16", "--seconds", "0.01", "--peers", "none", *CPU)
    for number, said in ((1, False), (2, True)):
        with threads(number):
            output = run(*quick)
        assert ("OMP_NUM_THREADS=1" in output) == said and f"CPU, {number} thread" + "s" * said + "," in output


def test_bench_of_ours_alone_and_of_unknown_peers():
    quick = ("bench", "local(100, window=30, block=32)", "--heads", "2", "--head-dim", "16", "--seconds", "0.01", *CPU)
    assert "SDPA" not in run(*quick, "--peers", "none")
    assert "--peers must be of sdpa, sdpa-mask, flex, fa4; got 'fa9'" in run(*quick, "--peers", "fa9", code=2)


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    """Queries without a live key are NaN for some peers."""
    right = bench.masked_sdpa
    inputs = drawn(HOLES, batch=1, heads=2, kv_heads=None, dim=16, dtype=torch.float32, seed=0)
    ours, dense, fair = bench.measured(inputs, HOLES, ["sdpa-mask"], 0.01)
    assert fair.forward > 0 and fair.why == "" and ours.both > 0 and dense.forward > 0
    monkeypatch.setattr(bench, "masked_sdpa", lambda mask, grouped: right(masks.causal(200), grouped))
    *_, other = bench.measured(inputs, HOLES, ["sdpa-mask"], 0.01)
    assert other.forward is None and "wrong result" in other.why


def test_a_peer_that_fails_or_gives_nan_takes_no_others_times_away(monkeypatch):
    inputs = drawn(HOLES, batch=1, heads=2, kv_heads=None, dim=16, dtype=torch.float32, seed=0)
    reason = "FlexAttention does not support backward on CPU. " * 3

    def fails(mask, rule, grouped):
        raise RuntimeError(f"{reason}\nMore of it")

    monkeypatch.setattr(bench, "flex", fails)
    monkeypatch.setattr(bench, "masked_sdpa", lambda mask, grouped: lambda q, k, v: q * torch.nan)
    ours, _, failed, wrong, dense = bench.measured(inputs, HOLES, ["flex", "sdpa-mask", "sdpa"], 0.01)
    assert (failed.name, failed.forward, failed.why) == ("FlexAttention, mask as bits", None, reason)
    assert wrong.forward is None and "wrong result: relative error nan" in wrong.why
    assert ours.forward > 0 and dense.forward > 0


def test_what_is_not_exact_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("it was timed"))
    monkeypatch.setattr(certificate, "errors_of", lambda *_: {"out": 1.5})
    assert "must be exact to be timed" in run("bench", "local(100, window=30, block=32)", *CPU, code=2)


def test_of_a_long_mask_the_end_is_compared():
    short, long = masks.local(256, window=64), masks.causal(128, 10_000)
    assert bench.corner(short) is short
    assert bench.corner(long) == masks.causal(128, 4096)
    assert bench.corner(masks.causal(5000)) == masks.causal(5000).crop(q=(904, 5000), k=(904, 5000))


def test_peers_are_those_that_fit():
    small, large = masks.local(256, window=64), masks.local(65536, window=64)
    assert bench.peers_for(small) == ["sdpa", "sdpa-mask"] and bench.peers_for(large) == ["sdpa"]


RULES = {
    "causal": [
        masks.causal(300), masks.causal(40, 300), masks.causal(40, 300, offset=0), masks.causal(300, 40),
        masks.butterfly(512, block=64) & masks.causal(512, block=64),
    ],
    "window": [
        masks.local(300, window=40), masks.local(300, window=40, causal=True), masks.local(300, left=7, right=90),
        masks.local(64, 300, window=40, causal=True, block=32), masks.per_head([masks.local(512, window=64)] * 2),
        masks.per_head([masks.local(512, window=64), masks.butterfly(512)]),
    ],
    "dilated": [masks.dilated(300, window=9, dilation=3), masks.dilated(300, window=9, dilation=3, causal=True)],
    "prefix": [masks.prefix_lm(300, prefix=70), masks.prefix_lm(64, 300, prefix=250)],
    "sinks": [
        masks.streaming(300, window=40, sink=3), masks.streaming(64, 300, window=40, sink=3),
        masks.longformer(300, window=40, global_tokens=3, causal=True),
    ],
    "global_tokens": [masks.longformer(300, window=40, global_tokens=3)],
    "runs": [
        masks.documents([100, 0, 170, 30]), masks.documents([100, 170, 30], causal=True), masks.chunked(300, chunk=70),
        masks.documents([5, 70], [100, 200], causal=True), masks.dense(300).with_lengths([200]),
    ],
    "padded": [
        masks.dense(300).with_lengths([200, 0, 300]), masks.causal(300).with_lengths([90, 90]),
        masks.documents([100, 200]).with_lengths(k_lengths=[250, 300]),
    ],
    "noop_mask": [masks.dense(256), masks.butterfly(1024), masks.dense(300, 170)],
    None: [
        HOLES, masks.neighborhood((20, 20), window=5), masks.longformer(300, window=40, global_tokens=[7, 200]),
        masks.per_batch([masks.causal(300), masks.local(300, window=40)]), ~masks.local(300, window=40),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "mask"), [(name, mask) for name, listed in RULES.items() for mask in listed])
def test_flexattention_gets_a_rule_that_is_the_mask(name, mask):
    found = mask_mod_of(mask)
    assert name == (found and found.__qualname__.partition(".")[0])
    if found is None:
        return
    q, k = torch.arange(mask.q_len)[:, None], torch.arange(mask.k_len)
    dense = mask.to_dense()
    live = [torch.as_tensor(found(torch.tensor(b), 0, q, k)).expand(dense.shape[2:]) for b in range(dense.shape[0])]
    rows, columns = q // mask.block_q, k // mask.block_k
    lists = interop.to_flex(mask)
    for b, h in product(range(dense.shape[0]), range(dense.shape[1])):
        counts, indices = lists.kv_num_blocks[b, h], lists.kv_indices[b, h]
        asked = torch.zeros(len(counts), -(-mask.k_len // mask.block_k), dtype=torch.bool)
        for row, count in enumerate(counts):
            asked[row, indices[row, :count].long()] = True
        asked = asked[rows, columns]
        assert torch.equal(live[b] & asked, dense[b, h] & asked)


def test_a_rule_that_differs_in_one_score_is_not_taken():
    window = masks.local(300, window=40, causal=True)
    assert mask_mod_of(window) is not None
    for q, k in ((299, 290), (150, 130), (60, 45)):
        single = torch.zeros(300, 300, dtype=torch.bool)
        single[q, k] = True
        assert mask_mod_of(window & ~BlockMask.from_dense(single)) is None


def test_runs_are_found_a_few_queries_at_a_time_and_not_in_masks_that_are_too_long(monkeypatch):
    mask = masks.documents([100, 170, 30], causal=True)
    whole = mask_mods._runs(mask)
    assert [int(x[150]) for x in whole] == [100, 151]
    monkeypatch.setattr(mask_mods, "SCORES_AT_ONCE", 7 * 300)
    assert all(map(torch.equal, mask_mods._runs(mask), whole))
    monkeypatch.setattr(mask_mods, "SCORES", 300 * 300 - 1)
    assert mask_mod_of(mask) is None


@pytest.mark.parametrize(
    ("mask", "name"), [(masks.causal(300), "FlexAttention"), (HOLES, "FlexAttention, mask as bits")]
)
def test_the_row_of_flexattention_says_whether_it_has_a_rule(mask, name, monkeypatch):
    from torch.nn.attention import flex_attention

    given = []

    def attend(q, k, v, *, block_mask, enable_gqa):
        given.append(block_mask)
        return attention(q, k, v, interop.from_flex(block_mask))

    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(flex_attention, "flex_attention", attend)
    inputs = drawn(mask, batch=1, heads=2, kv_heads=1, dim=16, dtype=torch.float32, seed=0)
    *_, flex = bench.measured(inputs, mask, ["flex"], 0.01)
    assert (flex.name, flex.why) == (name, "") and flex.forward > 0 and flex.both > 0
    assert ("mask_mods.py" in given[0].mask_mod.__code__.co_filename) == (name == "FlexAttention")


@pytest.fixture
def stand_in_fa4(monkeypatch):
    given = []

    def attend(q, k, v, *, causal=False, window_size=(None, None), **lists):
        given.append({"causal": causal, "window_size": window_size, **lists})
        rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        left, right = (None, 0) if causal else window_size
        live = torch.ones(len(rows), len(columns), dtype=torch.bool)
        live &= (left is None) | (columns >= rows - (left or 0))
        live &= (right is None) | (columns <= rows + (right or 0))
        if lists:
            live = interop.from_fa4(lists["block_sparse_tensors"], *live.shape).to_dense()[0, 0]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live, enable_gqa=True)
        return out.transpose(1, 2), None

    cute, sparsity = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    cute.flash_attn_func, sparsity.BlockSparseTensorsTorch = attend, SimpleNamespace
    for module in (ModuleType("flash_attn"), cute, sparsity):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["flash_attn"], "cute", cute, raising=False)
    return given


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (masks.causal(300), {"causal": True, "window_size": (None, None)}),
        (masks.local(300, window=40, causal=True), {"causal": False, "window_size": (39, 0)}),
        (masks.local(300, left=7, right=400, block=32), {"causal": False, "window_size": (7, None)}),
        (masks.dense(256), {"causal": False, "window_size": (None, None)}),
        (masks.butterfly(1024), None),
    ],
    ids=["causal", "window", "left", "dense", "lists"],
)
def test_flash_attention_4_gets_the_same_mask(mask, arguments, stand_in_fa4):
    inputs = drawn(mask, batch=1, heads=2, kv_heads=1, dim=16, dtype=torch.float32, seed=0)
    *_, fa4 = bench.measured(inputs, mask, ["fa4"], 0.01)
    assert fa4.why == "" and fa4.forward > 0 and fa4.both > 0
    if arguments is None:
        assert set(stand_in_fa4[0]) >= {"block_sparse_tensors", "block_sparse_tensors_bwd"}
    else:
        assert stand_in_fa4[0] == arguments


def test_flash_attention_4_has_no_rule_for_other_partial_tiles(stand_in_fa4, monkeypatch):
    inputs = drawn(HOLES, batch=1, heads=2, kv_heads=None, dim=16, dtype=torch.float32, seed=0)
    *_, fa4 = bench.measured(inputs, HOLES, ["fa4"], 0.01)
    assert fa4.forward is None and ("partial=True must be given" in fa4.why or "blocks must have 128" in fa4.why)
    assert bench.has_fa4()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert not bench.has_fa4()


def test_the_names_of_all_peers_fit_into_a_line(monkeypatch):
    names = [bench.OURS, bench.DENSE, *bench.PEERS.values(), f"{bench.PEERS['flex']}, {bench.AS_BITS}"]
    monkeypatch.setattr(bench, "measured", lambda *_: [bench.Times(name, 1234.567, 1234.567) for name in names])
    rows = run("bench", "local(100, window=30, block=32)", *CPU)
    assert all(name in rows for name in names)


@pytest.mark.gpu
def test_all_commands_on_a_gpu():
    mask = "masks.per_head([local(1024, window=256), butterfly(1024)])"
    assert "Exact: no error" in run("check", mask, "--kv-heads", "1")
    rows = run("bench", mask, "--seconds", "0.05", "--batch", "2")
    peers = [name for peer, name in bench.PEERS.items() if peer != "fa4"]
    assert all(name in rows for name in (bench.OURS, *peers)) and "something else" not in rows
    rows = run("bench", "local(1024, window=256, causal=True)", "--seconds", "0.05", "--head-dim", "64")
    assert f"{bench.PEERS['flex']} " in rows and bench.AS_BITS not in rows
    assert not bench.has_fa4() or bench.PEERS["fa4"] in rows


def test_the_build_of_torch_is_told_where_its_distribution_leaves_it_out(monkeypatch):
    from sparseflash.cli import info

    monkeypatch.setattr(info, "version", lambda name: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert info.versions()["torch"] == "2.13.0+cu130" and info.versions()["numpy"] == "2.13.0"


def test_info_tells_versions_devices_and_why_kernels_cannot_run():
    found = json.loads(run("info", "--json"))
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["sparseflash"] == __version__
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu" and cpu["backends"]["blockwise"] is None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert (cpu["backends"]["triton"] is None) == interpreted and cpu["backends"]["hopper"] is not None
    assert all(cache["bytes"] >= 0 and cache["folder"] for cache in found["caches"])
    said = unwrapped(run("info"))
    assert torch.__version__ in said and "PyTorch over live tiles: usable" in said and "not usable: " in said
    assert found["launcher"] == "compiled C" and "kernels started by compiled C" in said


def test_info_counts_caches_and_names_what_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel").write_bytes(b"12345")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(info, "_PACKAGES", ("no_such_package",))
    assert info.caches()[0] == {"name": "Triton's kernels", "folder": str(tmp_path), "files": 1, "bytes": 5}
    assert info.versions()["no_such_package"] is None
    assert "no_such_package not installed" in unwrapped(run("info"))


def test_info_gives_a_reason_once():
    backends = {"triton": "no GPU.", "hopper": "no GPU.", "blockwise": None}
    device = {"device": "cpu", "name": "x86_64", "backends": backends}
    said = dict(info.lines({"versions": {"cuda": None}, "devices": [device], "launcher": "", "caches": []}))
    assert said["  triton"].endswith("not usable: no GPU.")
    assert said["  hopper"].endswith("not usable: for the same reason") and said["  blockwise"].endswith(": usable")


def test_info_tells_of_a_triton_that_the_kernels_were_not_measured_with():
    facts = {"name": "NVIDIA H100", "capability": [9, 0], "memory_bytes": 80 << 30, "backends": {"hopper": None}}
    for versions, expected in ((None, None), ("Triton 9.9.9 is not", "Triton 9.9.9 is not")):
        device = {"device": "cuda:0", "versions": versions, **facts}
        said = dict(info.lines({"versions": {"cuda": "13.0"}, "devices": [device], "launcher": "", "caches": []}))
        assert said.get("  versions") == expected and said["  hopper"] == "kernels for Hopper: usable"


def test_info_asks_explain_about_the_installed_triton(monkeypatch):
    def explained(q, k, v, mask, backend):
        return Explanation(backend, "", versions="asked" if backend == "hopper" else None)

    monkeypatch.setattr(info, "explain", explained)
    monkeypatch.setattr(info.torch, "zeros", lambda *shape, device, dtype: torch.empty(*shape, dtype=dtype))
    assert info.usable("cuda:0") == (dict.fromkeys(("triton", "hopper", "blockwise")), "asked")


def test_the_folder_of_compiled_code_is_that_of_inductor(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert str(info._of_inductor()) == default_cache_dir()


def test_patterns_lists_what_the_library_has_in_a_sentence_each():
    said = unwrapped(run("patterns"))
    assert "pooled_scores" not in said
    assert "causal Every query sees the keys up to its own position, by default aligned at the bottom right." in said
    listed = json.loads(run("patterns", "--json"))
    assert {"local", "butterfly", "swin", "per_head"} < set(listed) < set(masks.__all__)
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in listed.values())


def test_patterns_describes_one():
    said = run("patterns", "local")
    assert said.startswith("local(q_len, k_len=None, *, window=None, ") and masks.local.__doc__.split("\n")[0] in said
    assert json.loads(run("patterns", "local", "--json"))["description"] == said.removesuffix("\n")
    assert run("patterns", "locl", code=2) == "Error: no pattern is called locl; did you mean local?\n"


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("m.mask", "RAGGED"), ("m.npz", "HOLES"), ("m.npy", "RAGGED"), ("sdpa", "RAGGED"), ("torch-sparse", "HOLES"),
        ("flex", "RAGGED"), ("fa4", "WHOLE"), ("flashinfer", "CAUSAL"), ("flashmask", "CAUSAL"),
        ("deepspeed", "WHOLE"),
    ],
)  # fmt: skip
def test_a_converted_mask_is_the_same_when_it_is_read(tmp_path, name, mask):
    mask = {"RAGGED": RAGGED, "HOLES": HOLES, "WHOLE": WHOLE, "CAUSAL": masks.causal(128, block=32)}[mask]
    mask.save(tmp_path / "in.mask")
    out = tmp_path / (name if "." in name else "out.pt")
    asked = () if "." in name else ("--to", name)
    said = json.loads(run("convert", str(tmp_path / "in.mask"), str(out), *asked, "--json"))
    assert said["bytes"] == out.stat().st_size and said["format"] in convert.NAMES
    assert mask_of(str(out)).to_dense().equal(mask.to_dense())
    assert "It holds BlockMask(" in run("convert", str(out), str(tmp_path / "again.mask"))
    if out.suffix == ".pt":
        assert set(torch.load(out, weights_only=True)) == {"kind", "format", "block", "fields"}


def test_one_pattern_of_several_is_selected(tmp_path):
    RAGGED.save(tmp_path / "in.mask")
    out = str(tmp_path / "head.npz")
    assert "select one with head=" in run("convert", str(tmp_path / "in.mask"), out, code=2)
    for name, to in (("head.npz", "scipy"), ("head.mask", "mask"), ("head.npy", "dense"), ("head.pt", "sdpa")):
        out = str(tmp_path / name)
        asked = "convert", str(tmp_path / "in.mask"), out, "--to", to
        run(*asked, "--head", "1")
        assert mask_of(out).to_dense().equal(RAGGED.to_dense()[:, 1:])
        assert "heads must lie in 0..1; got 2" in run(*asked, "--head", "2", code=2)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (("m.npz", "--to", "sdpa"), "must not be called .npz, which is for scipy; got --to sdpa. Name it m.pt"),
        (("m.pt", "--to", "fa4"), "--to fa4 must be given a mask of whole tiles, .*; got BlockMask.*partial=True"),
        (("m.pt",), "--to must be given for"),
        (("m.pt", "--to", "dense"), "m.pt must be called .npy for --to dense"),
        (("m.pt", "--to", "scipy"), "m.pt must be called .npz for --to scipy"),
        (("m.pt", "--to", "paper"), "--to must be of mask, scipy, dense, sdpa, .*; got 'paper'"),
        (("m.pt", "--to", "deepspeed"), "a DeepSpeed layout must consist of whole blocks"),
        (("none/m.mask",), "OUT must be in a folder that exists; got none/m.mask"),
    ],
)
def test_what_cannot_be_converted_is_told_and_nothing_is_written(tmp_path, monkeypatch, out, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(words, run("convert", "causal(100, block=32)", *out, code=2))
    assert list(tmp_path.iterdir()) == []


def test_flexattention_can_use_the_lists_of_a_file(tmp_path):
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
    from torch.nn.attention.flex_attention import create_block_mask

    run("convert", "causal(100, block=32)", str(tmp_path / "m.pt"), "--to", "flex")
    fields = torch.load(tmp_path / "m.pt", weights_only=True)["fields"]
    del fields["lookup"]
    rule = lambda b, h, q, k: k <= q  # noqa: E731
    flex = FlexBlockMask(mask_mod=rule, **fields)
    want = create_block_mask(rule, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)
    assert torch.equal(flex.to_dense(), want.to_dense())
    assert torch.equal(flex.full_kv_num_blocks, want.full_kv_num_blocks)


def test_files_of_others_are_not_masks(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "other.pt")
    assert "must be a file that convert wrote; got another one of torch.save" in run(
        "show", str(tmp_path / "other.pt"), code=2
    )
    torch.save({"kind": print}, tmp_path / "code.pt")
    assert "must be a file that convert wrote; got" in run("show", str(tmp_path / "code.pt"), code=2)
    whole = (tmp_path / "other.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for name in ("cut.pt", "none.npz", "none.npy"):
        (tmp_path / name).touch()
        assert run("show", str(tmp_path / name), code=2).startswith("Error: ")
    np.save(tmp_path / "added.npy", np.zeros((4, 4)))
    sparse.save_npz(tmp_path / "weights.npz", sparse.eye_array(4))
    for name in ("added.npy", "weights.npz"):
        assert "must be boolean (True: live); got" in run("show", str(tmp_path / name), code=2)
    masks.causal(64).save(tmp_path / "own.npz")
    assert mask_of(str(tmp_path / "own.npz")) == masks.causal(64)


FIELDS = {"layout": torch.ones(1, 2, 2, dtype=torch.bool), "block": 16}
CONVERTED = {"kind": "sparseflash.convert", "format": "deepspeed", "block": [16, 16], "fields": FIELDS}


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("format", []), ("block", None), ("fields", None), ("fields", {}), ("fields", FIELDS | {"layout": 3}),
        ("fields", FIELDS | {"block": "16"}),
    ],
)  # fmt: skip
def test_contents_that_convert_does_not_write_are_told_in_a_line(tmp_path, entry, value):
    file = tmp_path / "m.pt"
    torch.save(CONVERTED, file)
    assert mask_of(str(file)).shape == (1, 1, 32, 32)
    torch.save(CONVERTED | {entry: value}, file)
    assert "must be a file that convert wrote; got" in run("show", str(file), code=2)


def test_a_zip_file_that_cannot_be_read_is_told_in_a_line(tmp_path):
    file = tmp_path / "m.mask"
    masks.causal(64).save(file)
    contents = bytearray(file.read_bytes())
    entry = contents.index(b"PK\x01\x02")
    contents[entry + 6] = 109
    file.write_bytes(contents)
    assert "must be a sparseflash mask file, whole and undamaged" in run("show", str(file), code=2)


def npz_of(path, compression=zipfile.ZIP_DEFLATED, **arrays):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            npy = io.BytesIO()
            if isinstance(array, tuple):
                dtype, shape, contents = array
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(npy, header)
                npy.write(contents)
            else:
                np.lib.format.write_array(npy, np.asarray(array), allow_pickle=True)
            archive.writestr(f"{name}.npy", npy.getvalue())


CSR = {
    "format": b"csr",
    "shape": [4, 4],
    "indptr": np.arange(5, dtype=np.int32),
    "indices": np.arange(4, dtype=np.int32),
}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"data": ("|b1", (2**40,), b"\1" * 4)}, r"a member 'data.npy' of bool \[1099511627776\] with 4 bytes"),
        ({"data": ("|b1", (4,), b"\1" * 5)}, r"a member 'data.npy' of bool \[4\] with 5 bytes"),
        ({"data": np.ones(4, object)}, "a member 'data.npy' of object"),
        ({"data": np.ones(4, bool), "indptr": np.zeros(2, np.int32)}, "must be a file that convert wrote; got "),
        ({"data": np.ones(4, bool), "indices": np.full(4, 9, np.int32)}, "must be a file that convert wrote; got "),
        ({"data": np.ones(4, bool), "shape": [2**40, 2**40]}, "must be a file that convert wrote; got "),
        ({"data": np.ones(4, bool), "format": b"numpy"}, "must be a file that convert wrote; got "),
    ],
    ids=["no values", "more values", "objects", "few rows", "columns outside", "shape", "format"],
)
def test_a_matrix_that_is_not_what_its_file_says_is_refused_before_it_is_read(tmp_path, arrays, said):
    npz_of(tmp_path / "m.npz", **{**CSR, "data": np.ones(4, bool)})
    assert mask_of(str(tmp_path / "m.npz")).to_dense().squeeze().equal(torch.eye(4, dtype=torch.bool))
    npz_of(tmp_path / "m.npz", **{**CSR, **arrays})
    tracemalloc.start()
    assert re.search(said, run("show", str(tmp_path / "m.npz"), code=2))
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_an_archive_that_inflates_to_gigabytes_is_refused_by_its_list(tmp_path):
    file = tmp_path / "m.npz"
    npz_of(file, **{**CSR, "data": np.ones(4, bool)})
    contents = bytearray(file.read_bytes())
    entry = contents.index(b"PK\1\2", contents.index(b"PK\1\2") + 1)
    contents[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
    file.write_bytes(contents)
    said = run("show", str(file), code=2)
    assert re.search(
        r"m.npz must be a file that convert wrote; got arrays that are \d+ bytes larger than their file", said
    )
    assert "Store the mask as .mask (BlockMask.save), or in Python call interop.from_scipy(" in said


def test_members_that_are_no_plain_arrays_are_refused(tmp_path):
    file = tmp_path / "m.npz"
    npz_of(file, zipfile.ZIP_BZIP2, **{**CSR, "data": np.ones(4, bool)})
    assert "a member 'format.npy' that NumPy did not compress" in run("show", str(file), code=2)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.npy", b"\x93NUMPY\2\0" + (2**32 - 1).to_bytes(4, "little"))
    assert "a member 'data.npy' that is not a plain NumPy array" in run("show", str(file), code=2)


def test_a_matrix_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(convert.archives, "MOST_ENTRIES", 100)
    masks.causal(64).save(tmp_path / "in.mask")
    npz_of(tmp_path / "many.npz", **{**CSR, "data": np.ones(101, bool)})
    assert "got 101 stored entries; at most 2147483648 bytes and 100 entries" in run(
        "show", str(tmp_path / "many.npz"), code=2
    )
    said = run("convert", str(tmp_path / "in.mask"), str(tmp_path / "m.npz"), code=2)
    assert re.search(
        "--to scipy must be given a mask that can be read again; got a matrix of 2080 entries and 19240", said
    )
    assert not (tmp_path / "m.npz").exists()


def test_an_array_that_is_smaller_than_its_header_says_is_refused(tmp_path):
    for shape in ((2**20, 2**20), (2**40,), (8, 8)):
        file = tmp_path / "m.npy"
        with file.open("wb") as npy:
            np.lib.format.write_array_header_1_0(npy, {"descr": "|b1", "fortran_order": False, "shape": shape})
            npy.write(b"\1" * 16)
        tracemalloc.start()
        assert "m.npy must be a file that convert wrote; got " in run("show", str(file), code=2)
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["sdpa", "torch-sparse"])
def test_tensors_that_repeat_the_elements_of_their_file_are_refused(tmp_path, name):
    one = torch.ones(1, dtype=torch.bool)
    fields = {"attn_mask": one.expand(2**20, 2**20)}
    if name == "torch-sparse":
        indices = torch.zeros(2, 1, dtype=torch.int64).expand(2, 2**40)
        fields = {"matrix": torch.sparse_coo_tensor(indices, one.expand(2**40), (4, 4), check_invariants=False)}
    torch.save(CONVERTED | {"format": name, "fields": fields}, tmp_path / "m.pt")
    assert re.search(
        r"m.pt must be a file that convert wrote; got a tensor of shape \[.*\] that repeats the elements of its file",
        run("show", str(tmp_path / "m.pt"), code=2),
    )


def test_a_compressed_file_of_tensors_is_refused(tmp_path):
    torch.save(CONVERTED, tmp_path / "m.pt")
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as whole,
        zipfile.ZipFile(tmp_path / "n.pt", "w", zipfile.ZIP_DEFLATED) as n,
    ):
        for member in whole.namelist():
            n.writestr(member, whole.read(member) + bytes(1000))
    assert "n.pt must be a file that convert wrote; got a compressed member '" in run(
        "show", str(tmp_path / "n.pt"), code=2
    )


def test_json_has_numbers_and_nothing_else_is_printed(tmp_path):
    mask = masks.local(256, window=64)
    shown = json.loads(run("show", "local(256, window=64)", "--json", "--html", str(tmp_path / "m.html")))
    assert shown["digest"] == mask.digest and shown["scores"] == dataclasses.asdict(analysis.density(mask))
    assert shown["findings"] == [dataclasses.asdict(each) for each in analysis.lint(mask)]
    quick = ("local(100, window=30, block=32)", "--heads", "2", "--head-dim", "16", *CPU, "--json")
    checked = json.loads(run("check", *quick))
    assert checked["exact"] is True and list(checked["cases"][0]["errors"]) == ["out", "lse", "dq", "dk", "dv"]
    timed = json.loads(run("bench", *quick, "--seconds", "0.01", "--peers", "none"))
    assert [times["name"] for times in timed["milliseconds"]] == [bench.OURS, bench.DENSE]


def test_a_thorough_check_has_the_number_of_key_heads_that_was_asked_for():
    cases = certificate.cases_of(masks.causal(32), 4, 2, ["fp32"], 16, 0, thorough=True)
    assert {case.kv_heads for case in cases} == {1, 2, 4}


def test_a_certificate_tells_machine_cases_and_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(certificate, "_HEAD_DIMS", (16,))
    kept = tmp_path / "certificate.json"
    quick = ("check", "local(60, window=30, block=32)", "--head-dim", "8", *CPU, "--certificate", str(kept))
    output = run(*quick, "--thorough")
    assert "fp32, D=16, 2:1 heads" in output and "Exact: no error" in output
    found = json.loads(kept.read_text())
    assert found["exact"] is True and found["digest"] == masks.local(60, window=30, block=32).digest
    assert found["versions"]["torch"] == torch.__version__ and found["backend"] == "blockwise"
    cases = {(case["head_dim"], case["kv_heads"], case["seed"]) for case in found["cases"]}
    assert cases == {(dim, kv, seed) for dim in (8, 16) for kv in (1, 2) for seed in (0, 1, 2)}
    assert all(0 <= error <= 1 for case in found["cases"] for error in case["errors"].values())
    monkeypatch.setattr(certificate, "errors_of", lambda *_: {"out": 1.5})
    run(*quick, code=1)
    assert json.loads(kept.read_text())["exact"] is False


def test_shells_complete_commands_and_patterns():
    assert patterns_beginning_with("loca") == ["local("]
    assert "butterfly(" in patterns_beginning_with("")
    assert pattern_names("loca") == ["local"]
    done = python(
        "-c", "import sys; from sparseflash.cli import main; sys.argv[0] = 'sparseflash'; main()",
        environment={
            **os.environ, "_SPARSEFLASH_COMPLETE": "complete_bash", "COMP_WORDS": "sparseflash sh", "COMP_CWORD": "1",
        },
    )  # fmt: skip
    assert done.stdout.split() == ["show"], done.stderr


def test_it_runs_as_a_module_and_lists_its_commands():
    whole = python("-m", "sparseflash", "--help")
    assert whole.returncode == 0, whole.stderr
    assert all(name in whole.stdout for name in ("show", "check", "bench", "convert", "patterns", "info"))
    assert run("--version") == f"sparseflash {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("bench", "--help"), ()], ids=["version", "help", "of a command", "none"]
)
@pytest.mark.parametrize("script", [False, True], ids=["module", "script"])
def test_help_needs_no_pytorch(tmp_path, arguments, script):
    (tmp_path / "sparseflash").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom sparseflash.cli import main\nmain()\n"
    )
    how = (tmp_path / "sparseflash",) if script else ("-m", "sparseflash")
    command = [sys.executable, "-X", "importtime", *map(str, how), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path if script else ROOT, timeout=120)
    assert done.stdout.startswith(f"sparseflash {__version__}" if arguments == ("--version",) else "\n Usage:") or (
        "Usage" in done.stdout
    )
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "typer" in imported and imported.isdisjoint({"torch", "numpy", "sparseflash.masks"})


@pytest.mark.parametrize(
    ("command", "arguments", "is_help"),
    [
        (["python", "-m", "sparseflash", "show", "local(9)", "--help"], 3, True),
        (["python", "/bin/sparseflash", "--version"], 1, True),
        (["python", "-X", "dev", "-m", "sparseflash"], 0, True),
        (["python", "-m", "sparseflash", "patterns", "--", "--help"], 3, False),
        (["python", "-m", "sparseflash", "info"], 1, False),
        (["python", "train.py", "--help"], 1, False),
        (["python"], 0, False),
        ([], -1, False),
    ],
)
def test_only_help_of_the_command_is_help(command, arguments, is_help):
    assert sparseflash._is_help(command, arguments) is is_help


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--picture", "m.bmp"), "--picture must be a file called .png, .pdf, .svg; got m.bmp"),
        (("--picture", "mask"), "--picture must be a file called .png, .pdf, .svg; got mask"),
        (("--picture", "none/m.png"), "--picture must be in a folder that exists; got none/m.png"),
        (("--html", "none/m.html"), "--html must be in a folder that exists; got none/m.html"),
        (("--save", "none/m.mask"), "--save must be in a folder that exists; got none/m.mask"),
        (("--layers", "3"), "--layers must be given with --picture FILE; got --layers 3 alone"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(options, words, monkeypatch):
    monkeypatch.setattr(expression, "mask_of", lambda *_: pytest.fail("the mask was made"))
    assert words in run("show", "causal(100)", *options, code=2)


def test_a_picture_may_show_scores_or_tiles_and_every_head(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(BlockMask, "plot", lambda mask, **options: asked.append(options) or Figure())
    for options in ((), ("--elements",), ("--tiles", "--by-head")):
        run("show", "causal(100)", "--picture", str(tmp_path / "m.png"), *options)
    assert [(each["elements"], each["by_head"]) for each in asked] == [(None, False), (True, False), (False, True)]


def test_a_picture_may_show_who_has_reached_whom_layer_by_layer(tmp_path):
    mask, picture = masks.local(256, window=33, block=32).with_lengths([200, 256]), tmp_path / "m.svg"
    run("show", "local(256, window=33, block=32)", "--layers", "7", "--picture", str(picture), "--tiles")
    assert picture.stat().st_size > 1000
    figure = strip(mask, 7)
    step = mask.to_dense()[0, 0].float() + torch.diag((torch.arange(256) < 200).float())
    reached = torch.eye(256)
    for number, axes in enumerate(figure.axes, start=1):
        reached = (step @ reached > 0).float()
        share = f"{100 * float(reached.mean()):.3g} % reached"
        assert axes.get_title() == f"{number} layer{'s' * (number > 1)}: {share}"
    assert number == 7 and "batch element 0" in figure.get_suptitle()


def test_the_page_has_the_costs_beside_the_picture(tmp_path):
    said = run("show", "causal(100)", "--html", str(tmp_path / "m.html"))
    page = (tmp_path / "m.html").read_text()
    rows = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))
    assert {"scores", "forward", "backward", "reach"} <= set(rows) and rows["reach"] in unwrapped(said)


def test_a_picture_without_matplotlib_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    monkeypatch.setattr(expression, "mask_of", lambda *_: pytest.fail("the mask was made"))
    said = run("show", "causal(100)", "--picture", str(tmp_path / "m.PNG"), code=2)
    assert "--picture needs matplotlib: pip install 'sparseflash[plot]'" in said


def test_what_it_needs_is_said_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparseflash.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        command_line.main()
    monkeypatch.delitem(sys.modules, "sparseflash.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"the command line needs typer: pip install 'sparseflash\[cli\]'"):
        command_line.main()
