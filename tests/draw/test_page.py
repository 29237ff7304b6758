"""A mask as a page of its own."""

import base64
import json
import re

import numpy as np
import pytest
import torch

from sparseflash import BlockMask, masks
from sparseflash.draw.cells import shares
from sparseflash.draw.page import MOST_PANELS, to_page


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
