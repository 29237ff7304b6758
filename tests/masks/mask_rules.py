import torch

from sparseflash import BlockMask

BLOCKS = (16, 32, 64, 128)


def grid(q_len, k_len):
    return torch.arange(q_len)[:, None], torch.arange(k_len)[None, :]


def assert_keeps(mask, live):
    mask.validate()
    assert mask.shape == (1, 1, *live.shape)
    wrong = (mask.to_dense()[0, 0] != live).nonzero()
    assert len(wrong) == 0, f"differs first at (q, k) = {wrong[0].tolist()}"
    assert mask == BlockMask.from_dense(live, block=(mask.block_q, mask.block_k))
