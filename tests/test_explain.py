from unittest import mock

import pytest
import torch

import sparseflash
from sparseflash import attention, clear_caches, explain, masks, scores
from sparseflash.backends.triton import dispatch
from sparseflash.backends.triton.family import Family
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.overrides import always_split, override
from sparseflash.blockmask.streams import ReadyEvent
from tests.backends.triton.plans import kernels_of, plans_of
from tests.compiling.uninterpreted import python

HOPPER = {"capability": (9, 0)}  # Triton's interpreter stands for it


def empty(heads=4, tokens=4096, dim=64, dtype=torch.bfloat16, device="meta"):
    return [torch.empty(1, heads, tokens, dim, dtype=dtype, device=device) for _ in range(3)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.local(70, window=40, block=32),
        lambda: masks.butterfly(64, block=16),
        lambda: masks.causal(64, block=32).with_lengths([50]),
    ],
)
def test_it_tells_what_an_attention_has_run(make, split):
    mask = make()
    q, k, v = (torch.randn(1, 2, mask.q_len, 16).half().requires_grad_() for _ in range(3))
    with override(**({"splits": always_split(16)} if split else {})):
        attention(q, k, v, mask, backend="triton").sum().backward()
        ran = kernels_of(mask)
        told = {each.kernel: each for each in explain(q, k, v, mask, **HOPPER).kernels}
    assert told.keys() == ran.keys() == {"forward", "dq", "dk_dv"}
    for name, each in told.items():
        kernel = ran[name]
        assert (each.block_m, each.block_n, each.num_warps, each.num_stages) == kernel.choice.config[:4]
        assert each.programs == len(kernel.work.work) and each.chunks == kernel.work.parts
        assert each.tiles == kernel.work.work[..., 3].sum() and each.longest == kernel.work.work[..., 3].sum(1).max()
        assert each.loads.startswith("descriptors") == kernel.choice.descriptors
    assert split == any(each.chunks for each in told.values())


@pytest.mark.parametrize(
    ("change", "loads"),
    [
        (dict(capability=(8, 0)), "pointers: GPUs before Hopper"),
        (dict(capability=(9, 0)), "descriptors: TMA needs no registers"),
    ],
)
def test_the_gpu_decides_how_tiles_are_loaded(change, loads):
    for each in explain(*empty(), masks.causal(4096), **change).kernels:
        assert each.loads.startswith(loads)


def test_each_choice_has_its_reason():
    def reasons(q, k, v, mask=None, **more):
        found = explain(q, k, v, mask, **HOPPER, **more).kernels
        return {each.loads.partition(": ")[2] for each in found}, {each.walks for each in found}

    unaligned = [x[..., 1:] for x in empty(dim=65)]
    aligned_copies = explain(*unaligned, **HOPPER).kernels
    assert all(each.loads.startswith("descriptors") for each in aligned_copies)
    loads, _ = reasons(empty()[0], *(x.expand(1, 4, 4096, 64) for x in empty(heads=1)[1:]))
    assert loads == {"a tensor is expanded"}
    loads, walks = reasons(*empty(), masks.butterfly(4096, block=16))
    assert any("the cheapest by the model" in each for each in walks)
    with override(tiling=lambda tilings: next(each for each in tilings if each.gathered)):
        loads, walks = reasons(*empty(), masks.butterfly(4096, block=16))
    assert loads == {"TMA cannot gather blocks"}
    assert all("gathered from blocks of 16: overridden" in each for each in walks)
    with override(descriptors=False):
        assert reasons(*empty())[0] == {"overridden"}
    _, walks = reasons(*empty(tokens=64), masks.causal(64))
    assert walks == {"tiles of 128 x 128: there is too little work to search for others"}
    _, walks = reasons(*empty())
    assert all(each.endswith("every score is live") for each in walks)
    chosen_by = torch.randn(1, 4, 32, 32)
    _, walks = reasons(*empty(), masks.top_k_blocks(chosen_by, k=2, q_len=4096, block=128))
    assert all(each.endswith("a mask made on the GPU may be used only once") for each in walks)
    loads, _ = reasons(*empty(dtype=torch.float32, tokens=32), masks.causal(32, block=16))
    assert loads == {"tiles that are multiplied from registers need not come through shared memory"}


def test_short_sequences_without_a_mask_have_small_tiles():
    def tiles(tokens):
        found = explain(*empty(tokens=tokens, dim=32), **HOPPER).kernels
        return {each.kernel: (each.block_m, each.block_n) for each in found}, {each.walks for each in found}

    short, walks = tiles(64)
    assert set(short.values()) == {(64, 64)}
    assert walks == {"tiles of 64 x 64: every score is live"}
    assert tiles(65)[0]["forward"] == (64, 128)
    q, k, v = (*empty(tokens=64, dim=32)[:1], *empty(tokens=4096, dim=32)[1:])
    assert explain(q, k, v, **HOPPER).kernels[0].block_n == 128


def test_the_arithmetic_of_each_dtype_is_told():
    assert {each.arithmetic for each in explain(*empty(), **HOPPER).kernels} == {"half"}
    found = explain(*empty(dtype=torch.float32), **HOPPER).kernels
    assert [each.kernel for each in found] == ["forward", "dq, for delta", "dq", "dk_dv"]
    assert {each.arithmetic for each in found} == {"fp32 in pieces"}


def test_other_backends_have_no_kernels_to_tell_of():
    q, k, v = empty(device="cpu", tokens=64)
    assert str(explain(q, k, v)) == "backend blockwise: the default for tensors on cpu"
    assert str(explain(q, k, v, backend="reference")) == "backend reference: asked for"
    assert not explain(q, k, v).kernels


def test_nothing_to_compute_is_said():
    assert "there is nothing to compute" in str(explain(*empty(tokens=0), **HOPPER))


def test_dropout_and_lengths_are_explained_too():
    mask = masks.causal(4096).with_lengths([1000])
    assert len(explain(*empty(), mask, dropout_p=0.1, **HOPPER).kernels) == 3


def test_changed_scores_are_explained():
    changes = scores.softcap(30.0) + scores.bias(torch.rand(1, 1, 4096, 1))
    found = explain(*empty(), masks.causal(4096), scores=changes, **HOPPER)
    reason = "they support bias only alone or beside a sink; got it beside softcap"
    chosen = "portable", (("hopper", reason),)
    assert found.forward == found.backward == chosen
    assert [each.kernel for each in found.kernels] == ["forward", "dq", "dk_dv"]
    with pytest.raises(ValueError, match="the hopper kernels cannot serve this call"):
        explain(*empty(), scores=changes, backend="hopper", **HOPPER)
    divided = explain(*empty(), scores=scores.temperature(torch.ones(4)), **HOPPER)
    assert divided == explain(*empty(), **HOPPER)  # the queries are divided before


def test_the_kernels_of_changed_scores_are_those_that_run():
    gain, cap = torch.ones(2, requires_grad=True), torch.tensor(0.5)
    own = scores.function(lambda s, b, h, q, k, gain: s * gain[h] - cap, gain)
    q, k, v = (torch.randn(1, 2, 70, 16).half().requires_grad_() for _ in range(3))
    mask = masks.local(70, window=40, block=32)
    for changes in (own, own + scores.softcap(5.0) + scores.sink(torch.ones(2))):
        attention(q, k, v, mask, scores=changes, backend="triton").sum().backward()
        ran = kernels_of(mask)
        for device in ("cpu", "meta"):
            given = (x.to(device) for x in (q, k, v))
            told = {each.kernel: each for each in explain(*given, mask, scores=changes, **HOPPER).kernels}
            assert told.keys() == ran.keys() == {"forward", "dq", "dk_dv"}
            for name, each in told.items():
                kernel = ran[name]
                assert (each.block_m, each.block_n, each.num_warps, each.num_stages) == kernel.choice.config[:4]
        clear_caches()


def test_changes_of_scores_are_checked_for_every_backend():
    q, k, v = empty(tokens=64, device="cpu")
    assert str(explain(q, k, v, scores=scores.softcap(5.0))) == "backend blockwise: the default for tensors on cpu"
    with pytest.raises(TypeError, match=r"scores must be made by sparseflash\.scores"):
        explain(q, k, v, scores=torch.zeros(64, 64))
    with pytest.raises(ValueError, match="one entry for each of the 4 query heads"):
        explain(q, k, v, scores=scores.alibi(torch.ones(3)), **HOPPER)
    with pytest.raises(ValueError, match="must be on q's device"):
        explain(*empty(), scores=scores.alibi(torch.ones(4)))


def test_autocast_is_that_of_attention():
    q, k, v = (torch.randn(1, 1, 64, 64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {each.arithmetic for each in explain(q, k, v, **HOPPER).kernels} == {"half"}


@pytest.mark.parametrize("where", [{}, HOPPER], ids=["cpu", "hopper"])
def test_dtypes_that_differ_and_impossible_dropout_are_refused_as_by_attention(where):
    q, k, v = empty(device="cpu", tokens=64)
    with pytest.raises(TypeError, match="q, k and v must have one dtype"):
        explain(q, k.half(), v, **where)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and below 1"):
        explain(q, k, v, dropout_p=1.0, **where)


def test_what_attention_refuses_is_refused():
    q, k, v = empty(tokens=64)
    named = "backend must be 'triton', 'hopper' or None if capability is given; got 'reference'"
    with pytest.raises(ValueError, match=named):
        explain(q, k, v, backend="reference", **HOPPER)
    with pytest.raises(ValueError, match=r"if capability is given; got \[\]"):
        explain(q, k, v, backend=[], **HOPPER)
    with pytest.raises(ValueError, match="backend must be one of"):
        explain(q, k, v, backend="cuda")
    for wrong in ("H100", 9.0, (9,), [9, 0], ("9", "0")):
        with pytest.raises(TypeError, match=r"capability must be two integers, such as \(9, 0\) for an H100; got"):
            explain(q, k, v, capability=wrong)
    with pytest.raises(RuntimeError, match=r"needs compute capability 8\.0 .* asked about has 7\.5"):
        explain(q, k, v, capability=(7, 5))
    with pytest.raises(TypeError, match="must be fp16, bf16 or fp32"):
        explain(*(x.double() for x in (q, k, v)), **HOPPER)
    with pytest.raises(ValueError, match="mask must be for the lengths"):
        explain(q, k, v, masks.causal(32), **HOPPER)
    with pytest.raises(ValueError, match="mask must be on q's device"):
        explain(q, k, v, masks.causal(64))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_it_waits_for_plans_that_another_stream_makes(backend, monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    mask = masks.causal(4096, block=128)
    explain(*empty(), mask, backend=backend, **HOPPER)
    (plan,) = plans_of(mask)
    made = [*plan._worklists.values(), *plan._derived.values()]
    with mock.patch.object(ReadyEvent, "wait", autospec=True) as wait:
        explain(*empty(), mask, backend=backend, **HOPPER)
    assert made and all(mock.call(each.ready) in wait.call_args_list for each in made)


def test_a_new_family_is_one_entry_of_the_list_of_families():
    def refuses(request):
        if request.architecture.capability[0] != 10:
            return "they run on compute capability 10.0"
        return "they serve no backward" if request.backward else "they serve no forward"

    family = Family("sm100", mock.Mock(side_effect=AssertionError("its passes are not imported")), refuses)
    q, k, v = empty()
    with mock.patch.object(dispatch, "FAMILIES", (family, *dispatch.FAMILIES)):
        found = explain(q, k, v, capability=(10, 0))
        assert found.forward.family == found.backward.family == "portable"
        assert dict(found.forward.refusals)["sm100"] == "they serve no forward"
        assert dict(found.backward.refusals)["sm100"] == "they serve no backward"
        assert "not sm100: they serve no forward" in str(found)
        on_hopper = explain(q, k, v, capability=(9, 0)).forward.refusals
        assert dict(on_hopper)["sm100"] == "they run on compute capability 10.0"


@pytest.mark.parametrize("backend", [None, "triton", "hopper"])
def test_a_mask_that_is_made_at_every_step_is_explained_where_no_kernel_runs(backend):
    program = f"""
import torch
from sparseflash import explain, masks
q = torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
mask = masks.top_k_blocks(torch.rand(1, 8, 32, 32), k=4, q_len=4096, block=128)
assert mask.dynamic
for each in explain(q, q, q, mask, capability=(9, 0), backend={backend!r}).kernels:
    print(each.kernel, each.tiles, each.chunks)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    forward, *_ = done.stdout.splitlines()
    assert forward == f"forward {8 * 32 * 4} 0"


def test_chosen_blocks_are_explained_for_hopper_without_a_gpu():
    """Nothing that a GPU would plan with a kernel is compiled."""
    done = python(
        "-c",
        """
import torch
from sparseflash import BlockMask, explain
index = torch.arange(3).expand(1, 2, 128, 3).int()
q = torch.empty(1, 2, 16384, 128, dtype=torch.bfloat16)
found = explain(q, q, q, BlockMask.from_block_index(index, q_len=16384), capability=(9, 0))
print(found.forward.family, found.backward.family)
for each in found.kernels:
    print(each.kernel, each.tiles, each.longest, each.chunks)
""",
    )
    assert done.returncode == 0, done.stderr
    forward, *kernels = done.stdout.splitlines()
    assert forward == "hopper hopper"
    assert kernels[0] == "forward 768 3 0"


def test_it_is_public():
    assert "explain" in sparseflash.__all__ and "explain" in dir(sparseflash)


def test_tables_on_the_meta_device_are_those_that_they_are_with_contents():
    """Tables such as `offsets % 3` are not for the Hopper kernels."""
    mask = masks.causal(640)

    def told(device, bucket):
        q, k, v = (torch.empty(1, 2, 640, 64, device=device, dtype=torch.float16) for _ in range(3))
        table = torch.empty(2, 129, device=device)
        return str(explain(q, k, v, mask, scores=scores.relative(table, bucket), **HOPPER))

    for bucket in (lambda offsets: offsets % 3, scores.clipped(64)):
        assert told("meta", bucket) == told("cpu", bucket)
    assert "neighbouring distances mostly share" in told("meta", lambda offsets: offsets % 3)
    with pytest.raises(ValueError, match="bucket must return numbers from 0 to 128"):
        told("meta", lambda offsets: offsets.abs())
    on_meta = torch.zeros(1279, dtype=torch.int64, device="meta")
    assert "portable" in told("meta", lambda offsets: on_meta[: len(offsets)])


def test_a_mask_without_contents_is_refused_for_a_capability():
    q = torch.empty(1, 2, 640, 64, device="meta", dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"mask must have contents, because kernels are chosen by them; .* on the CPU\."
    ):
        explain(q, q, q, masks.causal(640).to("meta"), **HOPPER)
