import base64
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from sparseflash import BlockMask, masks
from sparseflash.blockmask.walks import walk
from sparseflash.draw.cells import shares
from sparseflash.draw.page import MOST_PANELS, to_page
from sparseflash.draw.page_script import SCRIPT
from sparseflash.draw.scores import kinds


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize(
    "mask",
    [masks.causal(500, block=32), masks.butterfly(100_000), masks.local(300, 200, window=40).with_lengths([100])],
)
def test_a_page_holds_the_exact_live_share_of_every_cell(mask):
    (panel,) = data_of(to_page(mask))["panels"]
    lengths = None if mask.lengths is None else tuple(mask.lengths[:, 0].tolist())
    expected = shares(mask, 0, 512, 512, lengths=lengths)
    for name, wanted in (("live", expected.live), ("full", expected.full)):
        found = np.zeros(panel["rows"] * panel["cols"])
        found[np.frombuffer(base64.b64decode(panel["at"]), "<u4")] = np.frombuffer(base64.b64decode(panel[name]), "<f4")
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-6)
    assert (panel["height"], panel["width"]) == (expected.step[0] * mask.block_q, expected.step[1] * mask.block_k)


def test_a_page_needs_nothing_else():
    page = to_page(masks.causal(1000), "<b>&")
    assert "<title>&lt;b&gt;&amp;</title>" in page and "<b>" not in page
    assert not re.search(r"https?:|//cdn|src=|href=|@import", page)
    assert len(to_page(masks.butterfly(1_048_576))) < 2_000_000


def test_patterns_have_panels_up_to_a_limit():
    several = BlockMask.from_dense(torch.eye(20, dtype=torch.bool)[:, None].expand(-1, 20, -1), block=16)
    page = to_page(several)
    assert len(data_of(page)["panels"]) == MOST_PANELS and "and 4 more patterns" in page
    assert data_of(page)["panels"][3]["title"] == "head 3"


def test_a_page_holds_every_score_of_masks_that_are_not_too_large():
    mask = masks.per_head([masks.local(300, 200, window=40, block=(32, 16)), masks.causal(300, 200, block=(32, 16))])
    page = data_of(to_page(mask))
    words = np.frombuffer(base64.b64decode(page["bits"]), "<i4").reshape(mask.bits.shape)
    assert np.array_equal(words, mask.bits.numpy()) and page["block"] == [32, 16]
    for panel, pattern in zip(page["panels"], range(2)):
        tiles, kinds = (np.frombuffer(base64.b64decode(panel[name]), "<u4") for name in ("tiles", "kinds"))
        own = walk(mask, pattern)
        assert np.array_equal(tiles, (own.rows * mask.blocks[1] + own.cols).numpy())
        assert np.array_equal(kinds, own.tile.numpy())
    assert "down to single scores" in to_page(mask)
    large = to_page(masks.random_blocks(65_536, count=400, block=128))
    assert "bits" not in data_of(large) and "down to single scores" not in large


def test_costs_stand_beside_the_picture():
    page = to_page(masks.causal(100), costs=[("scores", "5 & more"), ("reach", "<1 layer")])
    assert "<tr><th>scores</th><td>5 &amp; more</td></tr>" in page and "&lt;1 layer" in page
    assert "<table>" not in to_page(masks.causal(100))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize(
    "mask",
    [
        masks.local(100, window=9, block=32),
        masks.local(70, 50, window=40, block=(64, 16)),
        masks.butterfly(160, block=16),
        BlockMask.dense(64, block=32).with_lengths([40]),
        masks.local(128, window=30, block=64).with_lengths([70]),
    ],
    ids=repr,
)
def test_the_program_of_a_page_finds_the_kind_of_every_score(mask, tmp_path):
    """In Node.js, with a document that only remembers the canvas."""
    lengths = None if mask.lengths is None else tuple(mask.lengths[:, 0].tolist())
    expected = kinds(mask.canonical(), lengths=lengths)
    page = to_page(mask)
    document = """
const nothing = new Proxy(function () {}, { get: (target, name) => name === "width" ? 1 : nothing, set: () => true,
  apply: () => nothing, construct: () => nothing });
const made = [];
globalThis.ImageData = class { constructor(w, h) { this.data = new Uint8ClampedArray(4 * w * h); } };
globalThis.document = {
  getElementById: id => id === "data" ? { textContent: DATA } : nothing,
  createElement: () => { const each = { getContext: () => nothing, addEventListener() {}, append() {} };
    made.push(each); return each; },
};
"""
    document = document.replace("DATA", json.dumps(json.dumps(data_of(page))))
    asked = f"""
const canvas = made.find(each => each.kind);
canvas.zoom({{ x: 0.5, y: 0.5 }}, 0.1);  // draws single scores
const found = [];
for (let q = 0; q < {mask.q_len}; q++) for (let k = 0; k < {mask.k_len}; k++) found.push(canvas.kind(q, k));
console.log(JSON.stringify(found));
"""
    (tmp_path / "page.js").write_text(document + SCRIPT.replace('"use strict";', "") + asked)
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.array(json.loads(done.stdout)).reshape(expected.shape), expected)
