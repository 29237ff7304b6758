import io
import re
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from experiments.lra.config import Config
from experiments.lra.data.batches import collate
from experiments.lra.data.fingerprint import fingerprint
from experiments.lra.tasks import TASKS, books_matching, image, load
from experiments.lra.tasks.books_matching import KINDS, drawn, placed
from experiments.lra.train import Run
from experiments.training.books import archives_in, read, validates
from tests.experiments.lra.tasks.released_files import write_text


def archive(path, files, mode="w:xz"):
    with tarfile.open(path, mode) as made:
        for name, contents in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(contents)
            made.addfile(about, io.BytesIO(contents))
    return path


def jpeg(seed, side=32):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


def book(word, size=40_000):
    return " ".join(f"{word}{i}\n" for i in range(size // (len(word) + 6) + 1)).encode()


CONFIG = Config(
    mask="local", block=16, window=16, depth=1, width=32, heads=2, mlp=32, batch=4, steps=6, eval_every=3,
    checkpoint_every=3, log_every=1, lr=1e-3, warmup=2, device="cpu",
)  # fmt: skip
TITLES = {f"Author {i}": [f"First of {i}", f"Second of {i}", f"Third of {i}"][: 1 + i % 3] for i in range(60)}


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    files = {
        f"books/{'test' if author in list(TITLES)[:3] else 'train'}/{author}___{title}.txt": book(
            title.replace(" ", "")
        )
        for author, titles in TITLES.items()
        for title in titles
    }
    names = list(files)
    folder = tmp_path_factory.mktemp("books")
    for number, half in enumerate((names[::2], names[1::2]), start=1):
        archive(folder / f"books-{number}.tar.xz", {name: files[name] for name in half})
    return folder


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    monkeypatch.setattr(books_matching, "PAIRS", {"train": 60, "val": 20, "test": 40})


@pytest.mark.parametrize("mode", ["w:xz", "w:gz"])
def test_an_archive_of_reviews_is_the_folder(mode, tmp_path):
    write_text(tmp_path)
    packed = tmp_path / "packed"
    files = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.suffix == ".txt"
    }
    ours, theirs = load("text", archive(packed, files, mode)), load("text", tmp_path)
    assert fingerprint(ours) == fingerprint(theirs)
    assert all(bytes(ours.test.sequence(i)) == bytes(theirs.test.sequence(i)) for i in range(12))
    assert ours.val is ours.test


def test_an_archive_of_jpegs_is_read_in_grey_and_says_so(tmp_path):
    files = {
        f"cifar/{split}/{name}/{i:04}.jpg": jpeg(hash((split, i)) % 1000 + 10 * number)
        for split in ("train", "test")
        for number, name in enumerate(image.CLASSES)
        for i in range(2)
    }
    data = load("image", archive(tmp_path / "cifar.tar.xz", files))
    assert data.origin == "CIFAR-10 from JPEG"
    assert (len(data.train), len(data.val), len(data.test)) == (18, 2, 20)
    labels = [*data.train.labels, *data.val.labels]
    assert sorted(labels) == sorted(2 * list(range(10))) and labels != sorted(labels)
    decoded = np.asarray(Image.open(io.BytesIO(files["cifar/test/cat/0001.jpg"]))).transpose(2, 0, 1)
    wanted = image.grey(decoded.reshape(1, 3, 1024)).tobytes()
    assert wanted in {bytes(data.test.sequence(i)) for i in np.flatnonzero(data.test.labels == 3)}


@pytest.mark.parametrize(
    ("task", "files", "message"),
    [
        ("text", {"aclImdb/train/neg/0_1.txt": b"x"}, "must hold reviews in train/neg, train/pos, test/neg and"),
        ("image", {"train/cow/0.jpg": b"x"}, r"files {train,test}/CLASS/NUMBER.jpg alone; got train/cow/0.jpg"),
        ("image", {"train/cat/0.jpg": b"x"}, "train/cat/0.jpg must be a JPEG image"),
        ("image", {"train/cat/0.jpg": jpeg(0, 16)}, r"must have 32 x 32 pixels; got \(16, 16\)"),
        ("image", {"train/cat/0.jpg": jpeg(0)}, "must hold files in train/CLASS and in test/CLASS"),
        ("books-matching", {"books/train/A.txt": b"x"}, r"files {train,test}/AUTHOR___TITLE.txt alone"),
        ("books-matching", {"books/train/A___B.txt": b"x"}, "must have room for passages; got 1 bytes of"),
        (
            "books-matching",
            {f"books/{split}/A___{split}.txt": book("x") for split in ("train", "test")},
            "the authors of train and test must be different; got A in both",
        ),
        ("books-matching", {"books/train/A___B.txt": book("x")}, "must hold books of at least two authors for train"),
    ],
)  # fmt: skip
def test_other_archives_are_refused(task, files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(task, archive(tmp_path / "a.tar.xz", files))


@pytest.mark.parametrize("task", ["text", "image", "books-matching"])
def test_what_is_no_archive_is_named(task, tmp_path):
    (tmp_path / "a.tar.xz").write_bytes(b"no archive")
    with pytest.raises(
        ValueError, match=r"a.tar.xz must be an archive of .*; got ValueError: file could not be opened"
    ):
        load(task, tmp_path / "a.tar.xz")


def test_an_archive_that_was_cut_off_is_named(tmp_path):
    path = archive(tmp_path / "a.tar.xz", {f"aclImdb/train/neg/{i}_1.txt": jpeg(i) for i in range(40)})
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"a.tar.xz must be an archive of the Large Movie Review Dataset; got"):
        load("text", path)


def test_a_folder_without_archives_of_books_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no archives of books; pass an archive, or a folder"):
        load("books-matching", tmp_path)


def title_of(passage):
    words = re.findall(rb"([A-Z][a-z]+of\d+?)\d+ ", bytes(passage))
    return max(set(words), key=words.count)


def test_a_pair_is_of_one_book_exactly_if_its_label_says_so(books):
    data = load("books-matching", books)
    assert (len(data.train), len(data.val), len(data.test)) == (60, 20, 40)
    all_books, _ = placed(read(archives_in(books)))
    for split, examples in (("train", data.train), ("val", data.val), ("test", data.test)):
        assert examples.labels.tolist() == [1, 0] * (len(examples) // 2)
        spans = {each: (each.begin, each.end) for each in all_books[split]}
        for row in range(len(examples)):
            of = [
                [each for each, (begin, end) in spans.items() if begin <= first and first + 4000 <= end]
                for first in examples.begins[row]
            ]
            assert [len(each) for each in of] == [1, 1]
            assert (of[0] == of[1]) == bool(examples.labels[row])
            first, second = examples.begins[row]
            assert examples.labels[row] == 0 or abs(first - second) >= 4000
            assert b"\n" not in bytes(examples.sequence(row, 0))


def test_no_author_is_in_two_splits_and_the_name_alone_decides(books):
    by_split, _ = placed(read(archives_in(books)))
    authors = {split: {each.author for each in some} for split, some in by_split.items()}
    assert authors["test"] == set(list(TITLES)[:3])
    assert authors["val"] == {author for author in TITLES if validates(author)} - authors["test"] != set()
    assert set().union(*authors.values()) == set(TITLES)
    assert sum(map(len, authors.values())) == len(TITLES)


def test_the_kinds_of_pairs_are_what_they_say(books):
    by_split, symbols = placed(read(archives_in(books)))
    pairs, kinds = drawn(by_split["train"], symbols, 400, seed=0)
    assert np.bincount(kinds[1::2], minlength=3)[0] == 0 == kinds[::2].max()
    for row, kind in enumerate(kinds):
        first, second = (
            next(each for each in by_split["train"] if each.begin <= begin < each.end) for begin in pairs.begins[row]
        )
        assert KINDS[kind] == (
            "same book" if first is second
            else "another book by the author" if first.author == second.author
            else "another author"
        )  # fmt: skip
    again, _ = drawn(by_split["train"], symbols, 400, seed=0)
    assert (again.begins == pairs.begins).all()
    other, _ = drawn(by_split["train"], symbols, 400, seed=1)
    assert (other.begins != pairs.begins).any()


def test_a_run_on_pairs_of_books_pauses_and_resumes(books, tmp_path):
    data = load("books-matching", books)
    config = replace(CONFIG, task="books-matching", max_tokens=40)
    assert TASKS["books-matching"].towers == 2
    metrics = Run(config, data, tmp_path / "whole").train()
    Run(config, data, tmp_path / "parts").train(pause=lambda step: step == 4)
    resumed = Run(config, load("books-matching", books), tmp_path / "parts", resume=True)
    assert resumed.train()["test_loss"] == metrics["test_loss"]
    assert collate(data.train, np.array([0]), config.shape).ids.shape == (2, 48)
