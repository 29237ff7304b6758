import io
import json
import shutil
import tarfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from experiments.lm import probe, tested
from experiments.lm.cli import app
from experiments.lm.data.books import novels
from experiments.lm.data.store import Part, make_parts, opened, tokens_of, unpacked
from experiments.lm.data.tokenizer import BytePairs, Bytes
from experiments.lm.probe import Repeated, Word
from experiments.lm.train import Run
from experiments.training.archives import members
from experiments.training.books import validates
from tests.experiments.lm.models import tiny

AUTHORS = [f"Author {number}" for number in range(40)]
CPU = torch.device("cpu")


def text_of(author, title):
    return f"{title} by {author}. £5 for Éponine and Ptolemaeus. " * 40


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("books") / "books-1.tar.xz"
    with tarfile.open(path, "w:xz") as made:
        for number, author in enumerate(AUTHORS):
            for title in ("First", "Second"):
                text = text_of(author, title).encode("latin-1" if number % 2 else "utf-8")
                about = tarfile.TarInfo(f"books/{'test' if number < 4 else 'train'}/{author}___{title}.txt")
                about.size = len(text)
                made.addfile(about, io.BytesIO(text))
    return path


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def corpus(archive, tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus")
    result = call(
        "corpus", "--books", archive, "--vocabulary", 400, "--out", out / "tokens", "--pack", out / "a.tar.xz"
    )
    assert result.exit_code == 0, result.output
    assert "a.tar.xz: 0.0 MiB" in result.output
    return out


def documents_of(part, kind):
    return [kind.decode(part.tokens[a : b - 1].tolist()) for a, b in pairwise(part.starts)]


def test_no_author_is_in_two_parts_and_every_novel_is_one_document(corpus):
    store = opened(corpus / "tokens")
    authors = {name: set(some) for name, some in store.about["authors"].items()}
    assert authors["test"] == set(AUTHORS[:4])
    assert authors["val"] == {author for author in AUTHORS[4:] if validates(author)} != set()
    assert authors["train"] == set(AUTHORS) - authors["test"] - authors["val"]
    for name, part in (("train", store.train), ("val", store.val), ("test", store.test)):
        wanted = sorted(text_of(author, title) for author in authors[name] for title in ("First", "Second"))
        assert sorted(documents_of(part, store.tokenizer)) == wanted
    assert store.about["documents"]["test"] == 8


def test_less_training_text_keeps_the_other_parts_and_is_a_part_of_more(archive):
    whole = novels(archive)
    sizes = {name: [len(novel.book.text) for novel in part] for name, part in whole.items()}
    some = novels(archive, sum(sizes["train"]) // 2)
    assert 0 < len(some["train"]) < len(whole["train"])
    assert some["train"] == whole["train"][: len(some["train"])]
    assert (some["val"], some["test"]) == (whole["val"], whole["test"])


def test_the_packed_form_is_the_same_tokens(corpus):
    ours, theirs = unpacked(corpus / "a.tar.xz"), opened(corpus / "tokens")
    assert ours.about == theirs.about
    assert ours.tokenizer.size == theirs.tokenizer.size > 257
    for name in ("train", "val", "test"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one.tokens == other.tokens).all() and (one.starts == other.starts).all()
    made = ours.folder.stat().st_mtime_ns
    assert tokens_of(corpus / "a.tar.xz", 400, print).folder.stat().st_mtime_ns == made  # unpacked once
    (ours.folder / "about.json").unlink()  # such a folder is not complete
    assert unpacked(corpus / "a.tar.xz").about == theirs.about


def test_processes_that_unpack_at_the_same_time_do_not_disturb_each_other(corpus, monkeypatch):
    """Each has read a part of the archive when another has unpacked it."""
    path, depth = corpus / "a.tar.xz", [0]
    for folder in corpus.glob(".tokens-*"):
        shutil.rmtree(folder)

    def interrupted(*given):
        for place, member in enumerate(members(*given)):
            if place == 1 and depth[0] < 2:
                depth[0] += 1
                unpacked(path)
            yield member

    monkeypatch.setattr("experiments.lm.data.store.members", interrupted)
    assert unpacked(path).about == opened(corpus / "tokens").about and depth == [2]
    assert len(list(corpus.glob(".tokens-*"))) == 1


@pytest.mark.parametrize("contents", [b"", b"no archive"])
def test_what_is_no_packed_store_is_named(contents, tmp_path):
    (tmp_path / "a.tar.xz").write_bytes(contents)
    with pytest.raises(ValueError, match=r"a.tar.xz must be tokens that `corpus --pack` has written; got ValueError"):
        unpacked(tmp_path / "a.tar.xz")
    with tarfile.open(tmp_path / "b.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match=r"b.tar.xz must be tokens that `corpus --pack` has written; it has no about"):
        unpacked(tmp_path / "b.tar.xz")


class Recalls(nn.Module):
    """A token costs nothing if the two tokens before it were followed by it within the last `reach` tokens, else 1."""

    def __init__(self, reach):
        super().__init__()
        self.embedding = nn.Embedding(2, 2)
        self.reach = reach

    def forward(self, ids, labels, attentions=None, each=False):
        (row,), (wanted,) = ids.tolist(), labels.tolist()
        seen, losses = {}, []
        for place in range(len(row)):
            pair = tuple(row[max(0, place - 1) : place + 1])
            found, where = seen.get(pair, (None, -self.reach - 1))
            losses.append(0.0 if found == wanted[place] and place - where <= self.reach else 1.0)
            seen[pair] = (wanted[place], place)
        return torch.tensor([losses])


@pytest.fixture
def near(monkeypatch):
    monkeypatch.setattr(probe, "DISTANCES", (64, 128, 256))


@pytest.mark.usefixtures("near")
def test_the_probe_tells_how_far_a_model_reads():
    """Drawn tokens have no repetition of their own."""
    part = Part(np.random.default_rng(0).integers(0, 60_000, 20_000).astype(np.uint16), np.array([0, 20_000]))
    found = probe.measured(Recalls(150), part, Bytes(), 512, examples=6)
    assert [(each.kind, each.distance, each.examples) for each in found] == [
        ("sentence", 64, 6), ("sentence", 128, 6), ("sentence", 256, 6),
    ]  # fmt: skip
    assert [each.loss for each in found] == pytest.approx([0, 0, 1])
    assert [each.control for each in found] == pytest.approx([1, 1, 1])
    assert [each.gain for each in found] == pytest.approx([1, 1, 0])
    assert [each.error for each in found] == pytest.approx([0, 0, 0])
    assert [each.read for each in found] == [None] * 3


def test_a_sentence_and_its_control_differ_in_the_source_alone():
    part = Part(np.random.default_rng(1).integers(0, 60_000, 20_000).astype(np.uint16), np.array([0, 20_000]))
    tokens, control, first, end, distance = probe.sentence(part, 512, 200, np.random.default_rng(2))
    assert len(tokens) == len(control) == end == 513
    assert (tokens[-32:] == tokens[-232:-200]).all() and (tokens[-32:] == control[-32:]).all()
    different = np.flatnonzero(tokens != control)
    assert set(different) <= set(range(513 - 232, 513 - 200)) and len(different) > 25
    assert (first, distance) == (513 - 32 + probe.CUE, 200)


@pytest.fixture(scope="module")
def vocabulary():
    return BytePairs.trained(["the cat sat on a mat and saw Zoe or Zed in Quin or Qua so for him or her " * 30], 290)


def test_names_are_words_of_several_tokens_with_a_capital(vocabulary):
    (tokens,) = vocabulary.encode(["the Zebulon sat on Quixada, and A mat saw Zebulon."])
    part = Part(tokens, np.array([0, len(tokens)]))
    words = probe.names_of(part, vocabulary)
    assert [vocabulary.decode(word.tokens) for word in words] == [" Zebulon", " Quixada", " Zebulon"]
    for word in words:
        assert tuple(tokens[word.begin : word.begin + len(word.tokens)]) == word.tokens
    assert probe.names_of(part, Bytes()) == []


def test_a_name_counts_when_exactly_one_occurrence_of_its_document_is_in_the_context():
    part = Part(np.arange(100), np.array([0, 40, 100]))
    words = [Word(place, (7, 8)) for place in (2, 30, 45, 60, 99)]
    found = [(each.first.begin, each.second) for each in probe.repeated(part, words, 28)]
    assert found == [(45, 60)]
    found = [(each.first.begin, each.second) for each in probe.repeated(part, words, 29)]
    assert found == [(2, 30), (45, 60)]


def test_the_control_of_a_name_has_another_name_in_its_first_place():
    part = Part(np.arange(1000), np.array([0, 1000]))
    one, other = Repeated(Word(100, (100, 101, 102)), 300), Repeated(Word(500, (500, 501, 502)), 700)
    tokens, control, first, end, distance = probe.with_name(part, one, [one, other], 256, np.random.default_rng(0))
    assert len(tokens) == 257 == end and (first, distance) == (257 - 2, 200)
    assert tokens[-1] == 302
    place = 100 - (303 - 257)
    assert tokens[place : place + 3].tolist() == [100, 101, 102]
    assert control[place : place + 3].tolist() == [500, 501, 502]
    assert (np.delete(tokens, range(place, place + 3)) == np.delete(control, range(place, place + 3))).all()


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="must have two contexts, 1,024 tokens; it has 900"):
        probe.measured(Recalls(1), Part(np.arange(900), np.array([0, 900])), Bytes(), 512)


@pytest.mark.usefixtures("near")
def test_a_run_is_tested_on_other_authors(corpus, tmp_path):
    store = opened(corpus / "tokens")
    Run(tiny(vocabulary=400, context=128, steps=2), store, tmp_path / "run").train()
    result = call("test", tmp_path / "run", "--data", corpus / "a.tar.xz", "--examples", 3, "--device", "cpu")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "run" / "test.json").read_text())
    assert found["test_tokens"] == (len(store.test) - 1) // 128 * 128
    assert 3 < found["test_loss"] < 7
    assert [row[:2] for row in found["by_position"]][-1] == [64, 128]
    assert [(each["kind"], each["distance"]) for each in found["probe"]] == [("sentence", 64)]
    assert (tmp_path / "run" / "test-positions.csv").is_file()
    other = make_parts(novels_of_bytes(), tmp_path / "bytes", 257, print, {})
    with pytest.raises(ValueError, match=r"must hold a model of the tokens in .*bytes; its vocabulary differs"):
        tested.test(tmp_path / "run", other, CPU, tokens=1000, examples=0, say=print)
    (tmp_path / "bytes" / "test.bin").unlink()
    with pytest.raises(ValueError, match="must have texts for testing, as `corpus --books` gives; it has none"):
        tested.test(tmp_path / "run", opened(tmp_path / "bytes"), CPU, tokens=1000, examples=0, say=print)


def novels_of_bytes():
    class Plain:
        name, digest = "", b""

        def texts(self):
            return ["some text " * 200]

    return {name: [Plain()] for name in ("train", "val", "test")}
