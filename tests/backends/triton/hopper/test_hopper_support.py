from unittest import mock

import pytest
import torch

from sparseflash import attention, explain, masks
from sparseflash.backends.triton import api
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.hopper.configs import dq_config_for

HALF = Request(
    (9, 0), torch.bfloat16, (64, 64), (128, 128), lengths=False, dropout=False, dynamic=False, tokens=(8192, 8192),
    keys=1024.0, backward=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_three_head_dims_is_taken(dim, dtype):
    assert support.refuses(HALF._replace(dtype=dtype, dims=(dim, dim), block=(16, 64), lengths=True)) is None
    assert support.refuses(HALF._replace(dtype=dtype, dims=(dim, dim), block=(64, 64), dynamic=True)) is None


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("they run on compute capability 9.0; got 10.0", {"capability": (10, 0)}),
        ("they take fp16 and bf16; got torch.float32", {"dtype": torch.float32}),
        ("they take head dims that are multiples of 8 up to 256; got D = 36 and Dv = 64", {"dims": (36, 64)}),
        ("they take head dims that are multiples of 8 up to 256; got D = 64 and Dv = 264", {"dims": (64, 264)}),
        ("their backward supports only a sink above head dim 128; got softcap at D = 256 and Dv = 256",
         {"dims": (256, 256), "backward": True, "changes": ("softcap", "sink")}),
        ("they support only softcap, alibi, log_decay, sink at head dims other than 64, 96 and 128, and where D and Dv "
         "differ; got key_bias at D = 80 and Dv = 80", {"dims": (80, 80), "changes": ("key_bias", "sink")}),
        ("they have no dropout", {"dropout": True}),
        ("they need blocks of 128 x 128 for a mask that is made at every step; got 64 x 128",
         {"dynamic": True, "block": (64, 128)}),
        ("they need blocks of 128 x 128 for a mask that is made at every step; got 64 x 64",
         {"dynamic": True, "block": (64, 64), "backward": True, "changes": ("softcap",)}),
        ("they need blocks of 128 x 128 for a mask that is made at every step; got 64 x 32",
         {"dynamic": True, "block": (64, 32), "backward": True}),
    ],
)  # fmt: skip
def test_the_reason_is_given(reason, change):
    assert support.refuses(HALF._replace(**change)) == reason


@pytest.mark.parametrize("keys", [512, 4096, 8192])
def test_few_queries_are_theirs_where_their_keys_would_not_be_cut(keys):
    dense = HALF._replace(tokens=(8, keys), dims=(128, 128), keys=float(keys))
    assert support.yields(dense) is None
    assert support.yields(dense._replace(keys=keys - 1.0)).endswith(f"more programs; got 8 queries and {keys:,} keys")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_long_sequences_are_theirs(dim, backward):
    assert support.yields(HALF._replace(dims=(dim, dim), backward=backward)) is None


BELOW = "the portable {} is about as fast or faster, its launch included, below {} queries at D = {}; got {}"


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("the portable kernels read less memory in blocks of 64 x 128", {"block": (64, 128)}),
        ("the portable kernels read less memory in blocks of 64 x 64",
         {"block": (64, 64), "backward": True, "changes": ("softcap",)}),
        ("the portable kernels read less memory in blocks of 64 x 64",
         {"block": (64, 64), "backward": True, "dynamic": True, "tokens": (65536, 65536)}),
        ("the portable kernels read less memory in blocks of 32 x 32", {"block": (32, 32), "backward": True}),
        ("the portable kernels read less memory in blocks of 64 x 64", {"block": (64, 64)}),
        ("the portable kernels read less memory in blocks of 64 x 64", {"block": (64, 64), "dynamic": True}),
        (BELOW.format("forward", "1,024", 128, "512"), {"dims": (128, 128), "block": (64, 64), "tokens": (512, 512)}),
        (BELOW.format("forward", "4,096", 128, "2,048"), {"dims": (128, 128), "dynamic": True, "tokens": (2048, 2048)}),
        (BELOW.format("backward", "16,384", 128, "8,192"), {"dims": (128, 128), "dynamic": True, "backward": True}),
        ("the portable kernels are about as fast or faster at D = 64 with a mask that is made at every step",
         {"dynamic": True, "tokens": (65536, 65536)}),
        ("the work lists of a backward for a mask that is made at every step take 0.25 of q's memory",
         {"dims": (128, 128), "dynamic": True, "backward": True, "tokens": (65536, 65536), "patterns": 64}),
        ("the portable backward skips what lies past the lengths",
         {"lengths": True, "backward": True, "dims": (192, 192)}),
        ("the portable backward skips what lies past the lengths",
         {"lengths": True, "backward": True, "dims": (128, 128), "dynamic": True}),
        ("the portable backward skips what lies past the lengths",
         {"lengths": True, "backward": True, "dims": (128, 128), "block": (64, 64)}),
        ("the portable kernels split the keys of few queries over more programs; got 15 queries and 16,384 keys",
         {"tokens": (15, 16384), "dims": (128, 128)}),
        ("the portable kernels split the keys of few queries over more programs; got 127 queries and 16,384 keys",
         {"tokens": (127, 16384), "dims": (80, 80)}),
        (BELOW.format("forward", "512", 64, "511"), {"tokens": (511, 511)}),
        (BELOW.format("backward", "512", 128, "511"), {"tokens": (511, 511), "dims": (128, 128), "backward": True}),
        (BELOW.format("backward", "2,048", 64, "2,047"), {"tokens": (2047, 2047), "lengths": True, "backward": True}),
    ],
)  # fmt: skip
def test_where_the_portable_kernels_are_faster_they_are_chosen(reason, change):
    assert support.refuses(HALF._replace(**change)) is None and support.yields(HALF._replace(**change)) == reason


@pytest.mark.parametrize("changes", [(), ("key_bias",)])
def test_for_long_rows_the_hopper_kernels_are_chosen(changes):
    assert support.yields(HALF._replace(keys=8192.0, changes=changes)) is None


def test_an_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: True)
    assert support.refuses(HALF) == "they are written in Gluon, which Triton's interpreter cannot run"


def test_asked_for_where_they_cannot_run_they_say_so():
    q = torch.zeros(1, 1, 64, 20, dtype=torch.float16)
    with pytest.raises(
        ValueError, match="the hopper kernels cannot serve this call: they take head dims that are mult"
    ):
        attention(q, q, q, backend="hopper")


SLOWER_BELOW = {False: 64, True: 32}  # the least of D and Dv, by whether it is a backward


@pytest.mark.parametrize(
    "dims", [(16, 16), (32, 128), (48, 48), (80, 80), (192, 128), (64, 128), (192, 192), (256, 256)]
)
def test_other_head_dims_are_served_where_they_are_faster(dims):
    families = []
    for backward, least in SLOWER_BELOW.items():
        asked = HALF._replace(dims=dims, backward=backward)
        assert support.refuses(asked) is None
        direction, is_slower = "backward" if backward else "forward", min(dims) < least
        assert support.yields(asked) == (
            f"the portable {direction} is about as fast or faster below D = {least}; "
            f"got D = {dims[0]} and Dv = {dims[1]}"
            if is_slower
            else None
        )
        families.append("portable" if is_slower else "hopper")
    q, v = (torch.empty(2, 4, 4096, dim, dtype=torch.bfloat16, device="meta") for dim in dims)
    found = explain(q, q, v, capability=(9, 0))
    assert [found.forward.family, found.backward.family] == families
    found = explain(q, q, v, capability=(9, 0), backend="hopper")
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")
    wide = max(dims) > 128
    assert [(each.block_m, each.block_n) for each in found.kernels] == [
        (128, 64 if dims[1] > 128 else 128),
        (64 if max(dims) > 64 else 128, 128),
        *([(128, 64)] if wide else []),
    ]
    if wide:
        assert found.kernels[-1].num_stages == dq_config_for(*dims).stages


@pytest.mark.parametrize("dims", [(80, 80), (192, 128)])
def test_what_was_measured_at_common_head_dims_alone_runs_elsewhere(dims):
    asked = HALF._replace(dims=dims)
    said = f"they have not been measured {{}} at D = {dims[0]} and Dv = {dims[1]}; backend='hopper' asks for them"
    if max(dims) <= 128:
        assert support.yields(asked._replace(dynamic=True)) == said.format("with a mask that is made at every step")
    assert support.yields(asked._replace(block=(64, 64))) == said.format("in blocks of 64 x 64")
    capped = support.yields(asked._replace(changes=("softcap", "sink")))
    assert capped == (said.format("with softcap") if max(dims) > 128 else None)
    assert support.yields(asked._replace(changes=("sink",))) is None


@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (256, 256)])
def test_a_choice_for_wide_heads_is_served(dims):
    asked = HALF._replace(dims=dims, dynamic=True, backward=True, tokens=(2048, 2048))
    assert support.yields(asked) is support.yields(asked._replace(changes=("sink",))) is None
    assert support.yields(asked._replace(tokens=(2047, 2047))) == BELOW.format("backward", "2,048", dims[0], "2,047")
    assert support.yields(asked._replace(block=(64, 64))).startswith("they have not been measured in blocks of 64 x 64")
    not_wide = support.yields(asked._replace(dims=(80, 80), tokens=(65536, 65536)))
    assert not_wide.startswith("they have not been measured with a mask that is made at every step at D = 80")
    q, v = (torch.empty(1, 4, 4096, dim, dtype=torch.bfloat16, device="meta") for dim in dims)
    mask = masks.top_k_blocks(torch.rand(1, 1, 32, 32), k=4, q_len=4096, block=128)
    found = explain(q, q, v, mask, capability=(9, 0))
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")
    assert found.kernels[-1].num_stages == dq_config_for(*dims).stages
    asked = asked._replace(backward=False, tokens=(4096, 4096))
    assert support.yields(asked) is None
    assert support.yields(asked._replace(tokens=(4095, 4095))).startswith("the portable forward is about as fast")


def test_few_queries_of_many_keys_are_served_in_the_forward():
    for q_len, served in ((1024, True), (127, True), (16, True), (15, False), (1, False)):
        asked = HALF._replace(dims=(128, 128), tokens=(q_len, 65_536), keys=65_536.0)
        why = "the portable kernels split the keys of few queries over more programs"
        said = f"{why}; got {q_len:,} queries and 65,536 keys"
        assert support.yields(asked) == (None if served else said)
        assert support.yields(asked._replace(dynamic=True)) == said


def test_their_backward_serves_few_queries_with_tiles_of_128_in_one_pass():
    why = "the portable kernels split the keys of few queries over more programs"
    for dims, q_len, served in (((128, 128), 128, True), ((64, 64), 1024, True), ((80, 80), 128, True),
                                ((128, 128), 127, False), ((192, 128), 1024, False)):  # fmt: skip
        asked = HALF._replace(dims=dims, tokens=(q_len, 65_536), keys=65_536.0, backward=True, heads=16)
        said = f"{why}; got {q_len:,} queries and 65,536 keys"
        assert support.refuses(asked) is None and support.yields(asked) == (None if served else said)
        assert support.yields(asked._replace(dynamic=True, dims=(128, 128), heads=1)) == said
    small = HALF._replace(tokens=(1024, 65_536), keys=65_536.0, backward=True, heads=16, block=(64, 64))
    assert support.yields(small) == f"{why}; got 1,024 queries and 65,536 keys"


@pytest.mark.parametrize("version, served", [((3, 7), False), ((3, 8), True)])
def test_a_soft_cap_beside_another_change_at_d_64_depends_on_triton_in_the_backward_alone(
    monkeypatch, version, served
):  # fmt: skip
    monkeypatch.setattr(support, "triton_version", lambda: version)
    asked = HALF._replace(changes=("softcap", "distance"))
    assert support.yields(asked) is None
    said = (
        "the portable backward is faster at D = 64 with softcap beside another score modification before Triton 3.8, "
        "which spills fewer registers"
    )
    assert support.yields(asked._replace(backward=True)) == (None if served else said)
    assert support.yields(asked._replace(backward=True, dims=(128, 128))) is None
    assert support.yields(asked._replace(backward=True, changes=("softcap",))) is None
    assert support.yields(asked._replace(backward=True, changes=("softcap", "sink"))) is None


def test_explain_says_what_they_walk():
    q = torch.empty(2, 4, 1000, 64, dtype=torch.bfloat16, device="meta")
    mask = masks.causal(1000, block=128)
    found = explain(q, q, q, mask, capability=(9, 0), backend="hopper")
    assert (found.backend, found.forward.family, found.backward.family) == ("hopper", "hopper", "hopper")
    forward, backward = found.kernels
    assert forward.tiles == backward.tiles == 2 * 4 * len(mask.indices)
    assert (forward.programs, forward.longest) == (2 * 4 * 8, 8)
    assert backward.programs == 2 * 4 * 8 and backward.longest == 8


def test_each_pass_is_served_by_the_faster_kernels():
    q = torch.empty(2, 4, 16_384, 32, dtype=torch.bfloat16, device="meta")
    mask = masks.causal(16_384, block=128)
    found = explain(q, q, q, mask, capability=(9, 0))
    assert (found.forward.family, found.backward.family) == ("portable", "hopper")
    assert dict(found.forward.refusals)["hopper"].startswith("the portable forward is")
    assert [each.kernel for each in found.kernels] == ["forward", "dk, dv and dq"]
    assert "forward: portable kernels\n  not hopper: the portable forward" in str(found)
    found = explain(q, q, q, mask, capability=(9, 0), backend="triton")
    assert (found.forward.family, found.backward.family) == ("portable", "portable")
    refusals = dict(explain(q, q, q, mask, capability=(8, 0)).backward.refusals)
    assert refusals == {"hopper": "they run on compute capability 9.0; got 8.0"}


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_masks_made_at_every_step_are_theirs(tokens, block):
    q = torch.empty(1, 4, tokens, 128, dtype=torch.bfloat16, device="meta")
    mask = masks.top_k_blocks(torch.rand(tokens // block, tokens // block), k=4, q_len=tokens, block=block)
    found = explain(q, q, q, mask, capability=(9, 0))
    is_fast = block == 128 and tokens == 16384
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper" if is_fast else "portable")
    with torch.no_grad():
        found = explain(q, q, q, mask, capability=(9, 0), backend="hopper")
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")
    tiles = 4 * 4 * tokens // block  # a backward has room for more
    assert found.kernels[0].tiles == tiles
    assert {each.walks for each in found.kernels} == {f"tiles of {block} x {block}: the only ones"}


def test_who_insists_on_them_learns_before_the_forward_that_there_is_no_backward(monkeypatch):
    monkeypatch.setattr(gpu, "capability_of", lambda device: (9, 0))
    q = torch.zeros(1, 1, 256, 64, dtype=torch.float16, requires_grad=True)
    mask = masks.top_k_blocks(torch.rand(8, 8), k=2, q_len=256, block=32)
    with mock.patch.object(api, "attention", side_effect=AssertionError("the forward")):
        with pytest.raises(ValueError, match=r"the hopper kernels cannot .*: .* of 128 x 128 for .*; got 32 x 32"):
            attention(q, q, q, mask, backend="hopper")
        served = masks.top_k_blocks(torch.rand(4, 4), k=2, q_len=256, block=64)
        with pytest.raises(AssertionError, match="the forward"):
            attention(q, q, q, served, backend="hopper")


def test_a_group_that_shares_its_chosen_blocks_needs_little_room():
    chosen = HALF._replace(dynamic=True, backward=True, dims=(128, 128), tokens=(65536, 65536), keys=2048.0)
    assert support.yields(chosen._replace(patterns=4)) is None
    assert support.yields(chosen._replace(patterns=64)).endswith("0.25 of q's memory")


@pytest.mark.parametrize(("choices", "family"), [(1, "hopper"), (16, "portable")])
def test_a_backward_is_portable_where_each_of_many_heads_has_a_choice_of_its_own(choices, family):
    q = torch.empty(1, 16, 65536, 128, dtype=torch.bfloat16, device="meta")
    mask = masks.top_k_blocks(torch.rand(1, choices, 512, 512), k=32, q_len=65536, block=128)
    assert explain(q, q, q, mask, capability=(9, 0)).backward.family == family


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [96, 128])
def test_the_forward_in_blocks_of_64_is_theirs(dim, dynamic):
    assert support.yields(HALF._replace(dims=(dim, dim), block=(64, 64), dynamic=dynamic)) is None


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (1, 64), (64, 4096), (4096, 64)])
def test_they_take_short_sequences_without_a_mask(dim, queries, keys):
    q = torch.empty(2, 4, queries, dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4, keys, dim, dtype=torch.bfloat16, device="meta")
    found = explain(q, k, k, capability=(9, 0), backend="hopper")
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")


def test_the_forward_walks_small_blocks_as_they_are():
    q = torch.empty(2, 4, 1000, 128, dtype=torch.bfloat16, device="meta")
    mask = masks.causal(1000, block=64)
    forward, backward = explain(q, q, q, mask, capability=(9, 0), backend="hopper").kernels
    assert (forward.block_m, forward.block_n, forward.num_warps) == (64, 64, 10)
    assert forward.walks == "tiles of 64 x 64: the only ones" and forward.tiles == 2 * 4 * len(mask.indices)
    assert forward.programs == 2 * 4 * 16 // 2  # two items at a time
    assert backward.walks == "tiles of 128 x 128: enough of the blocks in live tiles of 128 x 128 are live"


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (80, 128)], ids=str)
def test_the_backward_walks_scattered_blocks_of_64_as_they_are(dims):
    q, v = (torch.empty(2, 4, 4096, dim, dtype=torch.bfloat16, device="meta") for dim in dims)
    mask = masks.random_blocks(4096, count=7, block=64)
    _, of_keys, of_queries = explain(q, q, v, mask, capability=(9, 0), backend="hopper").kernels
    assert (of_keys.kernel, of_queries.kernel) == ("dk and dv", "dq")
    for each in (of_keys, of_queries):
        assert (each.block_m, each.block_n, each.num_warps) == (64, 64, 5)
        assert each.walks == "tiles of 64 x 64: too few of the blocks in live tiles of 128 x 128 are live"
        assert each.tiles == 2 * 4 * 64 * 8
    assert of_queries.programs == 2 * 4 * 64 and of_keys.programs == 2 * 132  # two at a time a multiprocessor


def test_who_serves_scattered_blocks_of_64_is_a_limit_by_head_dim(monkeypatch):
    asked = HALF._replace(block=(64, 64), backward=True, tokens=(16_384, 16_384))
    assert support.yields(asked._replace(tokens=(16_383, 16_383))) == BELOW.format("backward", "16,384", 64, "16,383")
    assert support.yields(asked) is None and support.yields(asked._replace(changes=("sink",))) is None
    monkeypatch.setattr(support, "LIMITS", support.LIMITS._replace(backward_dim_small=96))
    assert support.yields(asked) == "the portable kernels read less memory in blocks of 64 x 64"  # not timed yet
    assert support.yields(asked._replace(dims=(128, 128))) is None
    chosen = asked._replace(dims=(128, 128), dynamic=True, tokens=(65536, 65536))
    assert support.yields(chosen) == "the portable kernels read less memory in blocks of 64 x 64"


@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize(("dim", "least"), [(64, 4096), (96, 512), (128, 512)])
def test_the_backward_serves_small_blocks_that_fill_tiles_of_128(block, dim, least):
    asked = HALF._replace(dims=(dim, dim), block=(block, block), backward=True, tokens=(least, least), filled=0.9)
    assert support.yields(asked) is None and support.yields(asked._replace(changes=("sink",))) is None
    shorter = asked._replace(tokens=(least - 1, least - 1))
    assert support.yields(shorter) == BELOW.format("backward", f"{least:,}", dim, f"{least - 1:,}")
    assert support.yields(asked._replace(filled=0.7)) is not None
    assert support.yields(asked._replace(changes=("softcap",))).endswith(f"less memory in blocks of {block} x {block}")


@pytest.mark.parametrize(
    ("block", "dense", "scattered"),
    [(128, "hopper", "hopper"), (64, "hopper", "portable"), (32, "hopper", "portable"), (16, "portable", "portable")],
)
def test_how_full_tiles_are_decides_who_serves_small_blocks(block, dense, scattered):
    q = torch.empty(1, 2, 2048, 128, dtype=torch.bfloat16, device="meta")
    window = masks.local(2048, window=512, causal=True, block=block)
    some = masks.random_blocks(2048, count=2, block=block)
    families = [explain(q, q, q, mask, capability=(9, 0)).backward.family for mask in (window, some)]
    assert families == [dense, scattered]


def test_a_short_side_does_not_change_the_kernels_of_a_long_one():
    q = torch.empty(2, 4, 4096, 128, dtype=torch.bfloat16, device="meta")
    families = {explain(q, k, k, capability=(9, 0)).forward.family for k in (q[:, :, :65], q[:, :, :64])}
    assert families == {"hopper"}
