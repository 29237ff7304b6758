import pytest
import torch

import sparseflash.masks as library
from experiments.lra.custom_mask import beacons
from experiments.lra.mask_picture import draw
from experiments.lra.model import masks
from sparseflash import BlockMask
from sparseflash.draw import MEANINGS, kinds

OWN = """
from sparseflash import BlockMask
from sparseflash.draw import MEANINGS, kinds
def narrow(q_len, *, block):
    return BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, q_len, block=block)
def tall(q_len):
    return narrow(q_len, block=32)
def by_head(b, h, q, k):
    return k <= q
def three(a, b, c):
    pass
def shorter(q_len, *, block):
    return BlockMask.dense(q_len - 1, block=block)
def tensor(q_len, *, block):
    return narrow(q_len, block=block).to_dense()
def rule(q, k):
    return k <= q
def nothing():
    pass
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_masks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "own_masks.py"


def build(name):
    return masks.build(name, 96, block=32, window=20)


def test_names_give_the_librarys_masks():
    assert build("dense") == BlockMask.dense(96, block=32)
    assert build("local") == library.local(96, window=20, block=32)
    assert build("butterfly") == library.butterfly(96, block=32)


def test_own_masks_by_module_and_by_file(own):
    expected = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 96, block=32)
    assert build("own_masks:narrow") == build(f"{own}:narrow") == expected
    assert build("experiments.lra.custom_mask:beacons") == beacons(96, block=32)
    assert build(f"{own}:rule") == build(f"{own}:by_head") == library.causal(96, block=32)
    assert build(f"{own}:tall") == expected


def test_any_pattern_of_the_library_is_a_name_or_an_expression():
    assert build("causal") == library.causal(96, block=32)
    both = library.streaming(96, window=20, sink=4, block=32) | library.butterfly(96, block=32)
    assert build("streaming(n, window=20, sink=4) | butterfly(n)") == both
    assert build("local(n, window=20, block=16)").block_q == 16


def test_the_example_keeps_to_its_formula():
    q, k = torch.arange(200)[:, None], torch.arange(200)[None]
    live = ((q - k).abs() <= 48) | (q < 16) | (k < 16)
    assert torch.equal(beacons(200, block=64).to_dense()[0, 0], live)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("butterfyl", r"the pattern must be dense, local, butterfly, an expression such as local\(n, window=64\), or a "
         "function as file.py:function; got 'butterfyl'"),
        ("no_such_module:mask", "there is no module no_such_module; a Python file ends with .py"),
        ("experiments.lra.nothing:mask", "there is no module experiments.lra.nothing; a Python file"),
        ("no/such/file.py:mask", "there is no file no/such/file.py"),
        ("own_masks:wide", "own_masks must define a function wide; it has none"),
        ("own_masks:number", "own_masks must define a function number"),
        ("own_masks:", "a function as file.py:function; got 'own_masks:'"),
        ("own_masks:tensor", "own_masks:tensor must return a BlockMask; got Tensor"),
        ("own_masks:three", r"own_masks:three must take the number of tokens, and the block size by name, as function"
         r"\(q_len, \*, block\) does, or be a rule of \(q, k\) or \(b, h, q, k\); got a function of \(a, b, c\)"),
        ("streaming", r"streaming must be called, with n for the number of tokens: streaming\(q_len"),
        ("lokal(n, window=3)", "no pattern is called lokal; did you mean local.* The number of tokens is n. For a f"),
        ("local(95, window=3)", "must return a mask of 96 queries and keys; got 95 and 95"),
        ("per_batch([causal(n), causal(n)])", "must return a mask for one batch element; got 2"),
        ("own_masks:nothing", r"own_masks:nothing must take .* got a function of \(\)"),
        ("own_masks:shorter", "own_masks:shorter must return a mask of 96 queries and keys; got 95 and 95"),
    ],
)  # fmt: skip
def test_names_that_give_no_mask_are_refused(own, name, message):
    with pytest.raises(ValueError, match=message):
        build(name)


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import a_module_that_is_missing")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        build(f"{path}:mask")


def test_picture_tells_full_and_partial_tiles_apart(tmp_path):
    mask = library.local(100, window=20, block=32)
    found = torch.from_numpy(kinds(mask))
    assert torch.equal(found >= 2, mask.to_dense()[0, 0])
    assert found[0, 99] == 0 and MEANINGS[0].startswith("empty")
    assert found[0, 31] == 1 and MEANINGS[1].endswith("dead score")
    assert (kinds(BlockMask.dense(96, block=32)) == 3).all()
    path = draw({"local": mask, "dense": BlockMask.dense(100, block=32)}, tmp_path / "deeper" / "masks.png")
    assert path.read_bytes().startswith(b"\x89PNG")
