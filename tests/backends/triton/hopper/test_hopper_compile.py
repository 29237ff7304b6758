import json
from itertools import product

import pytest

from sparseflash.backends.triton.hopper.configs import (
    BLOCK,
    GROUPS,
    MOST_MEMORY,
    SHARED_MEMORY,
    SMALL,
    WIDEST_BACKWARD,
    backward_config_for,
    config_for,
    dkdv_config_for,
    dq_config_for,
    tile_for,
    used_of,
)
from sparseflash.scores import change
from tests.compiling.uninterpreted import python

TABLES = [["table"], ["table", "learned", "parts"], ["table", "sink", "learned", "lengths"]]
BIASES = [["key_bias"], ["key_bias", "learned"], ["key_bias", "sink", "lengths", "learned"],
          ["key_bias", "sink", "lengths", "parts"], ["alibi", "key_bias"],
          ["alibi", "key_bias", "learned"]]  # fmt: skip
PAIRS = [["bias"], ["bias", "learned"], ["bias", "sink", "learned", "dead", "lengths", "parts"],
         ["tile_bias", "learned", "dead"], ["tile_bias", "sink", "learned", "lengths", "parts"]]  # fmt: skip
OURS = {"forward_kernel", "begin_kernel", "backward_kernel", "finish_kernel"}
PREPARING = {"table": "entries_kernel", "key_bias": "biases_kernel", "dead": "clear_kernel"}
WITHIN_LENGTHS = {"count_kernel", "time_kernel", "keep_kernel", "rank_kernel"}
MERGING = {"combine_rows_kernel", "combine_gradients_kernel"}


@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_spilled_or_serialised_and_the_softmax_runs_under_a_product(dim):
    check(dim, "bfloat16", [[], ["lengths"], ["parts"], ["lengths", "parts"]])


@pytest.mark.parametrize("dim", [64, 128])
def test_changed_scores_compile_as_well(dim):
    check(dim, "bfloat16", [["softcap"], ["alibi"], ["sink"], ["alibi", "learned"]])


@pytest.mark.parametrize("features", [TABLES, BIASES, PAIRS], ids=["tables", "of keys", "of pairs"])
@pytest.mark.parametrize("dim", [64, 128])
def test_so_do_tables_and_biases(dim, features):
    check(dim, "bfloat16", features)


@pytest.mark.parametrize("dim", [64, 128])
def test_so_do_tiles_of_64(dim):
    features = [], ["lengths", "parts"], ["alibi"], ["table"], ["key_bias"], ["bias"]
    check(dim, "bfloat16", [["small", *each] for each in features])


def test_fp16_compiles_as_bf16_does():
    check(64, "float16", [["lengths"], ["table", "learned"], ["key_bias", "learned"], ["bias", "learned"]])


@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
def test_so_does_the_forward_of_other_head_dims(dims):
    check_forward([dims], [[], ["lengths", "parts"], ["softcap"], ["alibi", "sink"]])


def test_and_of_values_with_a_dim_of_their_own():
    dims = (48, 48), (96, 48), (64, 128), (128, 256), (136, 192), (192, 192), (64, 256)
    check_forward(dims, [["lengths", "parts"]])


def test_and_in_tiles_of_64():
    check_forward([(32, 32), (80, 80), (48, 96), (96, 96)], [["small", "lengths", "parts"]])


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (32, 32), (80, 80), (48, 96)], ids=str)
def test_so_does_the_backward_in_tiles_of_64(dims):
    features = [["small", "spread", *more] for more in ([], ["lengths", "parts"], ["sink"])]
    for _, _, reports in compiled_by_another([dims], "bfloat16", features):
        assert "backward_kernel" not in reports
        check_two_kernels(reports, dims, SMALL)


def check_forward(dims, features):
    for each, some, reports in compiled_by_another(dims, "bfloat16", features):
        check_forward_kernel(reports, each, some)


def check_forward_kernel(reports, dims, features):
    check_backward(reports, dims, features)
    found = reports["forward_kernel"]
    config = config_for(dims[0], tile_for(SMALL if "small" in features else BLOCK, dims), dims[1])
    # Triton 3.9 spills nothing; 3.6 spills up to 4 counts and addresses at D = 256.
    assert found["spilled"] <= 32 and found["spilled_in_loop"] <= (7 if config.v_dims[0] == 256 else 0), found
    assert found["warnings"] == [] and found["shared"] <= SHARED_MEMORY and config.shared_memory >= found["shared"]
    assert found["direct"] and not found["two_layouts"]
    values = sum(piece > 0 for piece in config.v_dims)
    assert found["products"] == GROUPS * (config.dim // 16 + values * config.keys // 16)
    assert len(found["exponentials"]) == GROUPS and min(found["exponentials"]) >= config.keys // 2, found
    # A narrow accumulator is rescaled under a predicate instead of behind a branch.
    assert found["predicated"] <= (32 if sum(config.v_dims) < 64 else 0) and found["kept_predicates"] < 80, found


def check_backward(reports, dims, features):
    is_changed = not {"softcap", "alibi"}.isdisjoint(features)
    if max(dims) <= WIDEST_BACKWARD:
        found, config = reports["backward_kernel"], backward_config_for(*dims, kinds_of(features))
        used = [used_of(dim, config.dim) for dim in dims]
        pieces = sum(piece > 0 for each in used for piece in each)
        of_step = sum(map(sum, used)) // 16 + pieces * config.rows // 16
        assert found["products"] == config.joined * of_step + 128 // 16
        assert sum(found["exponentials"]) >= config.joined * 128 * config.rows // 256, found
        assert found["spilled_in_loop"] <= (4 if "softcap" in features else 0), found
    else:
        assert ("wide_dq_kernel" in reports) is not is_changed
        if is_changed:
            return
        check_two_kernels(reports, dims, BLOCK)
        return
    assert found["warnings"] == [] and found["shared"] <= SHARED_MEMORY, found
    assert found["direct"] and found["resident"] and not found["two_layouts"]


def check_two_kernels(reports, dims, tile):
    of_dq, config = reports["wide_dq_kernel"], dq_config_for(*dims, tile)
    pieces, groups = sum(piece > 0 for piece in config.dims), config.groups
    channels = sum(config.dims) + sum(config.v_dims)
    assert of_dq["products"] == groups * (channels // 16 + pieces * 64 // 16)
    assert config.shared_memory >= of_dq["shared"] and of_dq["spilled_in_loop"] == 0, of_dq
    its = dkdv_config_for(*dims, tile)
    of_keys = reports["wide_apart_kernel" if its.apart else "wide_dkdv_kernel"]
    # S and dP; dV and dK.
    written = pieces + sum(piece > 0 for piece in its.v_dims)
    assert of_keys["products"] == (1 if its.apart else groups) * (channels // 16 + written * 64 // 16), of_keys
    assert its.shared_memory >= of_keys["shared"]
    # Triton 3.9 spills an address in the branch for partial tiles at (64, 256).
    assert of_keys["spilled_in_steps"] <= (dims == (64, 256)), of_keys
    for found, programs in ((of_keys, its.programs), (of_dq, config.programs)):
        # Outside of steps: addresses and counts of an item.
        assert found["spilled"] <= (0 if groups == 1 or its.apart else 32 if found is of_dq else 96), found
        assert found["warnings"] == [] and found["shared"] <= MOST_MEMORY[programs], found
        assert found["direct"] and not found["two_layouts"] and not found["resident"]
    # Weights in shared memory are the operand of no product, which would need a fence and another barrier.
    assert (of_keys["weights"], of_dq["weights"]) == ([int(its.apart), 0], [0, 0])


def kinds_of(features):
    """The kinds of score modifications among the features of `hopper_compiled`."""
    kinds = {"alibi": "distance", "table": "relative"} | {x: x for x in ("softcap", "key_bias", *change.PAIRS, "sink")}
    return {kind for feature, kind in kinds.items() if feature in features}


def compiled_by_another(dims, dtype, features):
    """Yields `(dims, features, reports)` of each with each, all from one process."""
    both = list(product(dims, features))
    asked = (" ".join(["/".join(map(str, each)), dtype, *some]) for each, some in both)
    done = python("-m", "tests.backends.triton.hopper.hopper_compiled", *asked)
    assert done.returncode == 0, done.stderr[-2000:]
    for (each, some), reports in zip(both, json.loads(done.stdout.splitlines()[-1]), strict=True):
        yield each, some, reports


def check(dim, dtype, features):
    for _, some, reports in compiled_by_another([(dim, dim)], dtype, features):
        check_all(reports, dim, some)


def check_all(reports, dim, features):
    preparing = {kernel for change, kernel in PREPARING.items() if change in features}
    if "tile_bias" in features:  # dead tiles are not stored
        preparing -= {"clear_kernel"}
    if "lengths" in features:
        preparing |= WITHIN_LENGTHS
    names = {name.removesuffix(", second") for name in reports}
    assert names == OURS | preparing | (MERGING if "parts" in features else set())
    for name in OURS | preparing:
        found = reports[name]
        assert found["spilled"] == 0 or name == "backward_kernel", (name, found)
        assert found["warnings"] == [] and found["shared"] <= SHARED_MEMORY, (name, found)
        assert found["direct"] and not found["two_layouts"]
        assert found["resident"] == (name == "backward_kernel")
    forward, backward = reports["forward_kernel"], reports["backward_kernel"]
    keys = SMALL[1] if "small" in features else BLOCK[1]
    # 16 channels, or keys, an instruction; one more for a bias of keys.
    assert forward["products"] == GROUPS * (dim // 16 + keys // 16 + ("key_bias" in features))
    # 64 x `keys` scores, 128 threads.
    assert len(forward["exponentials"]) == GROUPS
    assert min(forward["exponentials"]) >= keys // 2, forward
    assert forward["predicated"] == 0, "full tiles must not be masked, nor what stays be rescaled"
    # 24 to 44 here; 260 to 524 if the compiler moves the tests of the mask's bits in front of the products.
    assert forward["kept_predicates"] < 80, "the mask's bits must be tested in the branch for partial tiles"
    # At D=64 dk, dv, S, dP and the weights take 224 of 240 registers. Addresses may spill, but no tile, which would be
    # 32 loads and stores. The derivative of a cap is live from the weights to dP, and sums for a slope, a bias of keys
    # or a table from step to step: up to 26 spills with Triton 3.9, 2 with 3.6, at D=128.
    of_learned = 26 if "table" in features else 22 if "key_bias" in features else 6
    few = 4 if "softcap" in features else of_learned if {"learned", "bias", "tile_bias"} & {*features} else 0
    config = backward_config_for(dim, dim, kinds_of(features))
    assert backward["spilled_in_loop"] <= (20 if dim == 64 else few), backward
    assert backward["products"] == config.joined * 2 * (dim + config.rows) // 16 + 128 // 16
    # 128 x `rows` scores, 256 threads.
    assert sum(backward["exponentials"]) >= config.joined * 128 * config.rows // 256, backward
