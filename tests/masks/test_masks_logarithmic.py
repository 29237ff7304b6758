import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import masks
from tests.drawn.masks import lengths
from tests.masks.mask_rules import assert_keeps
from tests.masks.sequence_sizes import MOST, assert_heads, reached, sizes, square

# ---------------------------------------------------------------------- Sparse Transformer, DeepSpeed


@given(sizes(), lengths(2 * MOST))
def test_strided_sees_the_latest_keys_and_every_so_manieth(size, stride):
    q_len, block = size
    q, k = square(q_len)
    local, far = (k <= q) & (q - k < stride), (k <= q) & ((q - k) % stride == 0)
    assert_keeps(masks.strided(q_len, stride=stride, attend="local", block=block), local)
    assert_keeps(masks.strided(q_len, stride=stride, attend="strided", block=block), far)
    assert_keeps(masks.strided(q_len, stride=stride, block=block), local | far)
    assert torch.equal((far.float() @ local.float()) > 0, torch.ones(q_len, q_len).tril() > 0)


@given(sizes(), st.integers(1, MOST), st.data())
def test_fixed_sees_its_chunk_and_the_summaries(size, stride, data):
    q_len, block = size
    num_verts = data.draw(st.integers(1, min(stride, 4)))
    summary = data.draw(st.integers(1, stride // num_verts))
    heads = data.draw(st.integers(1, 6))
    q, k = square(q_len)
    local = (k <= q) & (q // stride == k // stride)
    expected = {"local": [], "summary": [], "both": []}
    for head in range(heads if num_verts > 1 else 1):
        # As OpenAI's get_blocksparse_obj: sub-blocks of the chunk from its end on.
        chosen = list(range(stride - 1, -1, -1))[summary * (head % num_verts) :][:summary]
        columns = (k <= q) & torch.isin(k % stride, torch.tensor(chosen))
        expected["local"].append(local)
        expected["summary"].append(columns)
        expected["both"].append(local | columns)
    for attend, live in expected.items():
        mask = masks.fixed(
            q_len, stride=stride, summary=summary, attend=attend, heads=heads, num_verts=num_verts, block=block
        )
        assert_heads(mask, torch.stack(live))


def deepspeed_layout(count, local, wide, causal, horizontal, pattern, patterns):
    layout = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            layout[i, j] = i // local == j // local
    first = local - (1 + pattern % patterns) * wide
    starts = [chunk * local + first for chunk in range(count // local)]
    if count % local:
        starts.append(max(min(count // local * local + first, count - wide), 0))
    for start in starts:
        layout[:, start : start + wide] = True
        if horizontal:
            layout[start : start + wide] = True
    return layout.tril() if causal else layout


@given(st.integers(1, 260), st.sampled_from([(4, 1), (4, 2), (3, 1), (3, 3), (6, 2), (1, 1)]), st.data())
def test_deepspeed_fixed_has_global_blocks_in_every_chunk(q_len, local_and_wide, data):
    local, wide = local_and_wide
    causal = data.draw(st.booleans())
    horizontal = data.draw(st.booleans()) and not causal
    patterns = data.draw(st.integers(1, local // wide))
    heads = data.draw(st.integers(1, 5)) if patterns > 1 else 1
    count = -(-q_len // 16)
    live = torch.stack(
        [deepspeed_layout(count, local, wide, causal, horizontal, head, patterns) for head in range(heads)]
    )
    live = live.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :q_len, :q_len]
    mask = masks.deepspeed_fixed(
        q_len, local_blocks=local, global_blocks=wide, causal=causal, horizontal=horizontal,
        heads=heads, global_patterns=patterns, block=16,
    )  # fmt: skip
    assert_heads(mask, live.tril() if causal else live)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("horizontal", [False, True])
@pytest.mark.parametrize("count", [4, 8, 11, 13])
def test_deepspeed_fixed_is_deepspeeds_own_layout(causal, horizontal, count):
    config = pytest.importorskip("deepspeed.ops.sparse_attention.sparsity_config", reason="DeepSpeed is not installed")
    if causal and horizontal:
        pytest.skip("DeepSpeed has no horizontal global attention with unidirectional attention")
    layout = config.FixedSparsityConfig(
        num_heads=4, block=16, different_layout_per_head=True, num_local_blocks=4, num_global_blocks=1,
        attention="unidirectional" if causal else "bidirectional", horizontal_global_attention=horizontal,
        num_different_global_patterns=4,
    ).make_layout(16 * count)  # fmt: skip
    mask = masks.deepspeed_fixed(
        16 * count, causal=causal, horizontal=horizontal, heads=4, global_patterns=4,
        block=16,
    )  # fmt: skip
    tiles = mask.to_dense()[0].view(4, count, 16, count, 16).any(4).any(2)
    assert torch.equal(tiles, layout.bool())


# ---------------------------------------------------------------------- logarithmic, hierarchical


@given(sizes(), st.integers(1, 12), st.none() | st.integers(0, MOST))
def test_log_sparse_sees_keys_at_powers_of_two(size, window, more):
    q_len, block = size
    restart = None if more is None else window + more
    distances = set()
    for base in range(0, q_len, restart or q_len):
        end = base + (restart or q_len)
        distances |= set(range(base, min(base + window, end)))
        distances |= {d for p in range(12) if (d := base + window - 1 + 2**p) < end}
    q, k = square(q_len)
    live = torch.isin(q - k, torch.tensor(sorted(distances)))
    assert_keeps(masks.log_sparse(q_len, window=window, restart=restart, block=block), live)


@pytest.mark.parametrize("q_len", [1, 2, 3, 40, 64, 65, 128])
def test_log_sparse_reaches_the_past_in_log2_layers(q_len):
    step = masks.log_sparse(q_len, block=16).to_dense()[0, 0].float()
    reach = torch.eye(q_len)
    for _ in range((q_len - 1).bit_length()):
        reach = ((reach @ step) > 0).float()
    assert torch.equal(reach, torch.ones(q_len, q_len).tril())


def far_fields(count):
    level_of = {}

    def visit(level, a, b):
        if a << level >= count or b << level >= count:
            return
        if abs(a - b) >= 2:
            for i in range(a << level, min((a + 1) << level, count)):
                for j in range(b << level, min((b + 1) << level, count)):
                    assert (i, j) not in level_of
                    level_of[i, j] = level
        elif level > 0:
            for child in range(4):
                visit(level - 1, 2 * a + child // 2, 2 * b + child % 2)

    visit(10, 0, 0)
    return level_of


@given(st.integers(1, 40), st.integers(0, 15), st.booleans(), st.none() | st.integers(0, 5))
def test_hierarchical_sees_near_blocks_and_one_of_each_far_cell(count, missing, causal, levels):
    level_of = far_fields(count)
    most = 1 + max(level_of.values(), default=-1)
    if levels is not None and levels > most:
        return
    layout = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            if abs(i - j) <= 1:
                layout[i, j] = True
            elif levels is None or level_of[i, j] < levels:
                cell = 2 ** level_of[i, j]
                layout[i, j] = j == min(j // cell * cell + cell, count) - 1
    live = layout.repeat_interleave(16, 0).repeat_interleave(16, 1)[: 16 * count - missing, : 16 * count - missing]
    mask = masks.hierarchical(16 * count - missing, levels=levels, causal=causal, block=16)
    assert_keeps(mask, live.tril() if causal else live)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 21, 40])
def test_hierarchical_reaches_everything_within_log2_layers_or_so(count, causal):
    reach = reached([masks.hierarchical(16 * count, causal=causal, block=16)] * (count.bit_length() + 1))
    want = torch.ones(count, count, dtype=torch.bool)
    assert torch.equal(reach, want.tril() if causal else want)
