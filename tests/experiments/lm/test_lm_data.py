import numpy as np
import pytest
import torch

from experiments.lm.data import tokenizer
from experiments.lm.data.files import find
from experiments.lm.data.packing import Packing
from experiments.lm.data.store import Part, check_replaceable, make, opened, tokens_of
from experiments.lm.document_masks import DocumentMasks
from experiments.lm.model.attention import attention_over
from sparseflash import masks
from tests.experiments.lm.models import texts, tokens


def documents_of(part, kind):
    return [kind.decode(part.tokens[a : b - 1].tolist()) for a, b in zip(part.starts, part.starts[1:])]


@pytest.mark.parametrize("vocabulary", [257, 400])
def test_every_text_is_in_one_part_and_comes_back_byte_for_byte(tmp_path, vocabulary):
    store = tokens(tmp_path, vocabulary)
    train, val = (documents_of(part, store.tokenizer) for part in (store.train, store.val))
    assert train and val and not {*train} & {*val}
    assert {*train, *val} == {path.read_text() for path in (tmp_path / "texts").iterdir()}
    assert store.vocabulary == store.tokenizer.size <= vocabulary
    assert (store.train.tokens[store.train.starts[1:] - 1] == store.vocabulary - 1).all()
    assert store.train.tokens.dtype == np.uint16


def test_copies_are_left_out_so_none_is_in_both_parts(tmp_path):
    folder = texts(tmp_path / "texts")
    for path in list(folder.iterdir()):
        (folder / f"copy-{path.name}").write_text(f"  {path.read_text()}\n")
    found = find([folder])
    assert (len(found.documents), found.duplicates) == (60, 60)
    parts = found.split(0.3)
    digests = [{document.digest for document in part} for part in parts]
    assert not digests[0] & digests[1] and sum(map(len, digests)) == 60


def test_a_text_is_in_the_same_part_of_every_corpus(tmp_path):
    few, many = find([texts(tmp_path / "few", 40)]), find([texts(tmp_path / "many", 80)])
    _, val = few.split(0.3)
    _, others = many.split(0.3)
    assert {document.digest for document in val} <= {document.digest for document in others}


def test_what_is_no_text_is_skipped(tmp_path):
    folder = texts(tmp_path / "texts", 3)
    (folder / "short.txt").write_text("short")
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (folder / "zeros.bin").write_bytes(bytes(100))
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text("a" * 100)
    (folder / "packages").mkdir()
    (folder / "packages" / "b.txt").write_text("b" * 100)
    found = find([folder], excluded=["packages"])
    assert (len(found.documents), found.skipped) == (3, 3)
    assert [document.paths for document in find([folder], [".bin", ".txt"]).limited(700).documents] != []


def test_a_part_of_the_texts_has_some_of_both_kinds(tmp_path):
    found = find([texts(tmp_path / "texts", 60)])
    all_bytes = sum(document.bytes for document in found.documents)
    some = found.limited(all_bytes // 2)
    assert all_bytes / 3 < sum(document.bytes for document in some.documents) <= all_bytes / 2
    training, validation = some.split(0.5)
    assert min(len(training), len(validation)) > 8
    assert {document.digest for document in validation} <= {document.digest for document in found.split(0.5)[1]}


def test_a_special_name_in_a_text_is_not_the_special_token():
    pairs = tokenizer.BytePairs.trained(["abc abc abc"], 260)
    text = f"a{tokenizer.END}b é \U0001f600 \t\n"
    (found,) = pairs.encode([text])
    assert pairs.size - 1 not in found
    assert pairs.decode(found.tolist()) == text


def test_texts_of_a_folder_are_cut_once_and_again_when_they_change(tmp_path):
    folder = texts(tmp_path / "texts", 120)
    said = []
    first = tokens_of(folder, 257, said.append)
    count = len(said)
    assert count and tokens_of(folder, 257, said.append).about == first.about and len(said) == count
    (folder / "new.txt").write_text("something new " * 20)
    assert tokens_of(folder, 257, said.append).about != first.about
    assert tokens_of(tmp_path / "texts" / ".tokens-257", 5000, said.append).about["kind"] == "bytes"


def test_an_epoch_has_every_sequence_once_and_processes_share_each_batch():
    part = Part(np.arange(1001, dtype=np.uint16), np.array([0, 1001]))
    whole = Packing(part, 10, 20, seed=3)
    seen = np.concatenate([whole.numbers(step) for step in range(5)])
    assert sorted(seen) == list(range(100)) and list(seen) != sorted(seen)
    assert not np.array_equal(whole.numbers(0), whole.numbers(5))
    shares = [Packing(part, 10, 20, 3, slice(rank, None, 2)).numbers(7) for rank in range(2)]
    assert sorted(np.concatenate(shares)) == sorted(whole.numbers(7))
    rows = whole.rows(np.array([0, 4]))
    assert rows[1].tolist() == list(range(40, 51))


def test_documents_of_a_sequence_are_cut_at_its_ends():
    part = Part(np.arange(65, dtype=np.uint16), np.array([0, 10, 16, 20, 50, 65]))
    packing = Packing(part, 16, 1, 0)
    assert [packing.documents(number) for number in range(4)] == [[10, 6], [4, 12], [16], [2, 14]]


def test_separate_documents_do_not_see_one_another():
    part = Part(np.arange(129, dtype=np.uint16), np.array([0, 20, 64, 100, 129]))
    packing = Packing(part, 64, 1, 0)
    layer = masks.local(64, window=32, causal=True, block=16)
    made = DocumentMasks([layer, layer], lambda mask: attention_over(mask, "sparseflash"))
    first, second = made.masks([packing.documents(0), packing.documents(1)])
    assert first is second
    for number, bound in ((0, 20), (1, 36)):
        document = torch.arange(64) >= bound
        expected = layer.to_dense()[0, 0] & (document[:, None] == document[None])
        assert torch.equal(first.to_dense()[number, 0], expected)
    assert [len(layers) for layers in made.of_parts(packing, np.array([0, 1]), 1)] == [2, 2]


def test_what_is_missing_is_said_with_its_remedy(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        find([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"got none: choose another folder, or make one with `corpus`"):
        find([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match="there are no tokens"):
        opened(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"to validate on; got 60 and 0: .* or a larger share"):
        make(find([texts(tmp_path / "texts")]), tmp_path / "t", 257, lambda text: None, share=0.0)
    with pytest.raises(FileExistsError, match="must be empty, or hold tokens"):
        check_replaceable(tmp_path / "texts")
    with pytest.raises(ValueError, match="at least one batch of sequences, 4 of 64 tokens; got 1"):
        Packing(Part(np.arange(100), np.array([0, 100])), 64, 4, 0)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install tokenizers, or sparseflash\[lm\], or .* --vocabulary 256"):
        tokenizer.library()


def packages_of(folder, version):
    for name in ("alpha", "beta", "gamma"):
        for file in ("b.py", "inner/a.py"):
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {file} {version} " * 10)
    (folder / "single.py").write_text(f"single {version} " * 10)
    return find([folder], packages=True)


def test_the_files_of_a_package_are_one_document_in_the_order_of_their_paths(tmp_path):
    found = packages_of(tmp_path / "a", "1")
    assert {document.name for document in found.documents} == {"alpha", "beta", "gamma", "single.py"}
    assert found.files == 7
    store = make(found, tmp_path / "tokens", 257, lambda text: None, 0.6)
    parts = {name: documents_of(part, store.tokenizer) for name, part in (("train", store.train), ("val", store.val))}
    assert sum(map(len, parts.values())) == 4
    (alpha,) = (text for texts in parts.values() for text in texts if text.startswith("alpha"))
    assert alpha == "alpha b.py 1 " * 10 + "alpha inner/a.py 1 " * 10
    named = store.about["packages"]
    assert {*named["train"], *named["val"]} == {document.name for document in found.documents}
    assert {**named["train"], **named["val"]}["alpha"] == next(
        d for d in found.documents if d.name == "alpha"
    ).digest.hex()


def test_two_versions_of_a_package_are_in_the_same_part(tmp_path):
    one, two = (packages_of(tmp_path / version, version) for version in ("1", "2"))
    assert not {document.digest for document in one.documents} & {document.digest for document in two.documents}
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        names = [{document.name for document in found.split(share)[1]} for found in (one, two)]
        assert names[0] == names[1]
    assert [len(one.split(share)[1]) for share in (0.0, 1.0)] == [0, 4]
