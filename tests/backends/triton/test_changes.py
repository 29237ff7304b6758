from itertools import combinations

import pytest
import torch

from sparseflash import scores
from sparseflash.backends.triton.changes.hopper import HopperChanges, HopperRequest
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Functions, Request
from sparseflash.backends.triton.changes.kinds import HOPPER_KINDS, KINDS, Changed, changed_on_hopper, units_on_hopper
from sparseflash.backends.triton.decode.kernels import decode_kernel
from sparseflash.backends.triton.hopper.backward import backward_kernel as hopper_backward
from sparseflash.backends.triton.hopper.forward import forward_kernel as hopper_forward
from sparseflash.backends.triton.portable.dk_dv import dk_dv_kernel
from sparseflash.backends.triton.portable.dq import dq_kernel
from sparseflash.backends.triton.portable.forward import forward_kernel
from sparseflash.scores.change import Change, Scores, Sizes
from tests.compiling.uninterpreted import python

REQUEST = Request(1, 2, 40, 40, torch.float16, torch.device("cpu"), (16, 16))
CHANGES = {
    "softcap": scores.softcap(3.0),
    "distance": scores.alibi(torch.ones(2)),
    "relative": scores.relative(torch.ones(2, 8), scores.t5_buckets(8, 20)),
    "key_bias": scores.key_bias(torch.ones(1, 2, 40)),
    "bias": scores.bias(torch.ones(1, 2, 40, 40)),
    "function": scores.function(lambda s, b, h, q, k, x: s * x[h, q] + x[h, k], torch.ones(2, 40)),
    "sink": scores.sink(torch.ones(2)),
}


def changed(*kinds, learned=False):
    changes = Scores(tuple(CHANGES[kind] for kind in kinds)).prepared(Sizes(1, 2, 40, 40, torch.device("cpu")))
    return Changed(changes, REQUEST, [learned] * len(changes.tensors()))


@pytest.mark.parametrize(("options", "same"), [([], "True False False"), (["--without-key"], "True True True")])
def test_an_edited_device_function_and_another_fact_are_compiled_anew(options, same):
    """Triton's cache on disk takes a constant without a cache_key by its text."""
    done = python("-m", "tests.backends.triton.edited_change", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == same


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_equal_changes_are_equal_constants_and_what_is_learned_differs_only_where_it_is_written(kind):
    first, again = changed(kind), changed(kind)
    if first.constant("forward") is None:
        assert kind == "sink"
        return
    learned = changed(kind, learned=True)
    for part in ("forward", "rows", "columns"):
        assert first.constant(part) == again.constant(part)
        assert hash(first.constant(part)) == hash(again.constant(part))
        writes = bool(learned.learned(part))
        assert (first.constant(part) != learned.constant(part)) == writes or kind == "function"
    assert learned.constant("rows") != learned.constant("columns") or kind == "softcap"


def test_every_pair_of_changes_is_another_constant():
    kinds = [kind for kind in CHANGES if kind != "sink"]
    pairs = list(combinations(kinds, 2))
    found = [changed(*pair).constant("rows") for pair in pairs] + [changed(kind).constant("rows") for kind in kinds]
    assert len(set(found)) == len(found)


def test_every_change_has_a_file_unless_it_divides_the_queries():
    kinds = {kind for kind, each in Change.types.items() if each.__module__.startswith("sparseflash.")}
    assert kinds - {"temperature"} | {"function"} == KINDS.keys()


def test_more_whole_numbers_than_the_kernels_take_are_refused():
    Changes([Functions({}, {}, len(WHOLE_NUMBERS))])
    with pytest.raises(RuntimeError, match="more whole numbers than the kernels have arguments"):
        Changes([Functions({}, {}, len(WHOLE_NUMBERS)), Functions({}, {}, 1)])


def test_a_device_function_that_no_kernel_calls_is_refused():
    with pytest.raises(TypeError, match=r"device functions of a change must be from \('begin', .*; got \['applied'\]"):
        Functions({"applied": None}, {}, 0)


def test_kernels_that_change_scores_are_started_directly():
    """Otherwise Triton's launcher would have to start them."""
    source = (
        "import torch\n"
        "from experiments.benchmarks.compile import report\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash import scores\n"
        "from sparseflash.backends.triton.direct_start import parameters_of_compiled\n"
        "changes = scores.key_bias(torch.ones(1, 2, 1024)) + scores.softcap(3.0)\n"
        "changes += scores.function(lambda s, b, h, q, k, x: s * x[h, q], torch.ones(2, 1024))\n"
        "with compiling_for(90, assemble=False) as compiled:\n"
        "    report.launch_all(90, 'float16', 64, 64, 64, lengths=False, dropout=False, changes=changes)\n"
        "for name, kernel in compiled:\n"
        "    names = kernel.src.fn.arg_names\n"
        "    print(name, parameters_of_compiled(kernel, names) is not None)"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert {name: found.get(name) for name in ("forward_kernel", "dq_kernel", "dk_dv_kernel")} == dict.fromkeys(
        ("forward_kernel", "dq_kernel", "dk_dv_kernel"), "True"
    ), done.stdout


def on_hopper(*changes, backward, learned=False):
    known = {**CHANGES, "bias": scores.bias(torch.ones(1, 2, 40, 40).half())}
    changes = [known[x] if isinstance(x, str) else x for x in changes]
    changes = Scores(tuple(changes)).prepared(Sizes(1, 2, 40, 40, torch.device("cpu")))
    units = units_on_hopper(changes, 1.0, backward=backward)
    request = HopperRequest(torch.float16, 40, torch.device("cpu"), units, 64, 128, backward)
    return changed_on_hopper(changes, request, [learned] * len(changes.tensors()))


@pytest.mark.parametrize("backward", [False, True])
def test_every_change_of_a_hopper_kernel_is_another_constant(backward):
    kinds = [kind for kind in HOPPER_KINDS if kind in CHANGES and not (backward and kind == "sink")]
    others = [
        *((kind, "sink") for kind in kinds if kind != "sink" and not backward),
        (scores.log_decay(torch.ones(2)),),
    ]
    found = [on_hopper(*each, backward=backward).constant for each in [(), *((kind,) for kind in kinds), *others]]
    if backward:
        found += [on_hopper(kind, backward=True, learned=True).constant for kind in kinds if kind != "softcap"]
        assert on_hopper("sink", backward=True).constant == found[0], "lse includes the sink"
    assert len({each.cache_key for each in found}) == len(set(found)) == len(found)
    assert on_hopper("softcap", backward=backward).constant == found[1 + kinds.index("softcap")]


@pytest.mark.parametrize(
    "change",
    [{"keeps_branch": True}, {"reads_blocks": True}, {"may_be_nan": True}, {"adds": "threads"}, {"sent": 1}],
    ids=str,
)
def test_an_edited_fact_of_a_hopper_kernel_is_compiled_anew(change):
    (kind,) = on_hopper("sink", backward=False).all
    before = HopperChanges([kind])
    kind.__dict__.update(change)
    assert HopperChanges([kind]) != before


def test_the_hopper_backward_has_room_for_the_numbers_of_every_change():
    """Number 0 is the tile's; the last is the query head's, where sums are written head by head."""
    for kind in ("distance", "relative", "key_bias", "bias"):
        constant = on_hopper(kind, backward=True, learned=True).constant
        assert constant.SENT == 5 and constant.FIRST_SENT == (1,)
    both = on_hopper("distance", "key_bias", backward=True, learned=True)
    assert (both.constant.FIRST_SENT, both.constant.SENT) == ((1, 4), 6)


@pytest.mark.parametrize(
    ("kernel", "most"),
    [
        (hopper_forward, 37), (hopper_backward, 38), (forward_kernel, 40), (dq_kernel, 45), (dk_dv_kernel, 43),
        (decode_kernel, 44),
    ],
)  # fmt: skip
def test_no_kernel_has_more_parameters_than_today(kernel, most):
    assert len(kernel.arg_names) <= most
