import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.lra.baselines import baselines
from experiments.lra.data.batches import (
    PADDING,
    Shape,
    blocks_of_rows,
    check_images,
    collate,
    evaluation_batches,
    evaluation_order,
    training_batches,
)
from experiments.lra.data.examples import Examples
from experiments.lra.data.listops import tokens
from experiments.lra.data.listops.generator import Settings, generate
from experiments.lra.data.order import Order
from experiments.lra.tasks import TASKS, load
from experiments.lra.tasks.listops import open_file
from tests.experiments.lra.models import examples

RELEASED = (
    b"Source\tTarget\r\n"
    b"( ( ( [MAX 3 ) 4 ) ] )\t4\r\n"
    b"( ( ( ( [SM 2 ) ( ( ( [MIN 7 ) 5 ) ] ) ) 9 ) ] )\t6\r\n"
    b"( ( ( [MED 1 ) 8 ) ] )\t4\r\n"
)


@pytest.fixture
def released(tmp_path):
    folder = tmp_path / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (folder / f"basic_{split}.tsv").write_bytes(RELEASED)
    return folder


def test_released_files_are_read_from_any_level_of_the_archive(released):
    for folder in (released, released.parent, released.parent.parent):
        data = load("listops", folder)
        assert not data.generated
        assert [tokens.decode(bytes(data.train.sequence(i))) for i in range(3)] == [
            ["[MAX", "3", "4", "]"],
            ["[SM", "2", "[MIN", "7", "5", "]", "9", "]"],
            ["[MED", "1", "8", "]"],
        ]
        assert data.test.labels.tolist() == [4, 6, 4]


def test_unix_line_ends_are_read_too(released):
    path = released / "basic_val.tsv"
    path.write_bytes(RELEASED.replace(b"\r\n", b"\n"))
    assert len(load("listops", released).val) == 3


def test_generated_files_are_known_as_generated(tmp_path):
    folder = generate(Settings(10, 40, 20, 5, 5), tmp_path, workers=1)
    data = load("listops", folder)
    assert data.generated
    assert (len(data.train), len(data.val), len(data.test)) == (20, 5, 5)


def test_cache_is_mapped_from_disk_and_follows_the_file(released):
    path = released / "basic_train.tsv"
    first = open_file(path)
    assert isinstance(first.symbols, np.memmap)
    assert len(list((released / "tokens").iterdir())) == 1
    assert open_file(path).symbols.tolist() == first.symbols.tolist()
    path.write_bytes(RELEASED + b"( ( ( [SM 3 ) 4 ) ] )\t7\r\n")
    assert len(open_file(path)) == 4
    os.utime(path, ns=(0, 0))
    open_file(path)
    assert len(list((released / "tokens").iterdir())) == 3


def test_data_that_cannot_be_written_to_says_so(released, monkeypatch):
    def refused(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(ValueError, match=r"folder tokens, which cannot be written \(Permission denied\)"):
        load("listops", released)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"( ( ( [MAX 3 ) 44 ) ] )\t4\r\n", "line 5 of .*basic_train.tsv is not a ListOps example"),
        (b"( ( ( [MAX 3 ) 4 ) ] )\t11\r\n", "has the class b'11' where one digit must stand"),
        (b"( ( ( [MAX 3 ) 4 ) ] )\r\n", "line 5 of"),
    ],
)
def test_a_bad_line_is_named(released, line, message):
    (released / "basic_train.tsv").write_bytes(RELEASED + line)
    with pytest.raises(ValueError, match=message):
        load("listops", released)
    assert not list(released.glob("tokens/*train*"))


def test_wrong_header_and_empty_file_are_named(released):
    (released / "basic_train.tsv").write_bytes(b"a\tb\r\n")
    with pytest.raises(ValueError, match="must begin with the header Source<tab>Target; got b'a"):
        load("listops", released)
    (released / "basic_train.tsv").write_bytes(b"Source\tTarget\r\n")
    with pytest.raises(ValueError, match="at least one example"):
        load("listops", released)


def test_missing_files_are_named_with_what_to_do(released, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; place basic_train.tsv"):
        load("listops", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no ListOps files; place basic_train.tsv"):
        load("listops", tmp_path / "empty")
    (released / "basic_val.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks basic_val.tsv; place"):
        load("listops", released)
    with pytest.raises(ValueError, match=r"the task must be one of listops, text, .*; got 'chess'"):
        load("chess", released)


def test_generated_files_without_their_label_are_refused(tmp_path):
    folder = generate(Settings(10, 40, 20, 5, 5), tmp_path, workers=1)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "generator.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"generated files without their generator.json"):
        load("listops", tmp_path / "copy")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 40), st.booleans())
def test_batches_are_padded_to_whole_blocks(lengths, max_tokens, cls):
    shape = Shape(16, max_tokens, TASKS["listops"].cls if cls else None)
    batch = collate(examples(lengths), np.arange(len(lengths)), shape)
    assert shape.length % 16 == 0
    assert 0 <= shape.length - max_tokens - cls < 16
    assert batch.lengths.tolist() == [min(length, max_tokens) + cls for length in lengths]
    assert batch.ids.shape == (len(lengths), shape.row(max(batch.lengths.tolist())))
    assert batch.live_tokens == sum(batch.lengths.tolist())
    for row, length in enumerate(batch.lengths.tolist()):
        assert (batch.ids[row, :length] != PADDING).all()
        assert (batch.ids[row, length:] == PADDING).all()
        assert (batch.ids[row, 0] == TASKS["listops"].cls) == cls


def test_black_pixels_are_left_out_and_the_others_know_their_places():
    symbols = np.array([0, 7, 0, 0, 9, 3, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0], np.uint8)
    begins = np.array([[0], [6], [13]])
    data = Examples(symbols, begins, np.array([[6], [13], [16]]), np.array([1, 0, 1], np.uint8), shift=1)
    batch = collate(data, np.arange(3), Shape(16, 3, cls=257, drop_background=True))
    assert batch.lengths.tolist() == [4, 2, 2]
    assert batch.ids[:, :4].tolist() == [[257, 8, 10, 4], [257, 6, 0, 0], [257, 1, 0, 0]]
    assert batch.places[:, :4].tolist() == [[0, 2, 5, 6], [0, 7, 0, 0], [0, 1, 0, 0]]
    with pytest.raises(ValueError, match=r"an image has 3 pixels that are not black.* raise --max-tokens, which is 2"):
        collate(data, np.arange(3), Shape(16, 2, cls=None, drop_background=True))
    with pytest.raises(ValueError, match=r"an image has 3 pixels that are not black.* raise --max-tokens, which is 2"):
        check_images(data.take(np.array([2, 0])), Shape(16, 2, cls=None, drop_background=True))
    check_images(data, Shape(16, 2, cls=None))
    check_images(data, Shape(16, 3, cls=None, drop_background=True))


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 10), st.integers(0, 5), st.booleans())
def test_an_epoch_sees_every_example_once(sizes, batch, seed, buckets):
    count = len(sizes)
    order = Order(count, min(batch, count), seed, np.array(sizes) if buckets else None)
    row = np.concatenate([order.rows(step) for step in range(-(-3 * count // order.batch))])
    epochs = row[: 3 * count].reshape(3, count)
    assert (np.sort(epochs) == np.arange(count)).all()
    if count > 20:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


@given(SIZES, st.integers(1, 10), st.integers(0, 5))
def test_the_examples_of_a_batch_are_of_one_size(sizes, batch, seed):
    """At most one mixed batch in an epoch for each border between sizes, and one shared with the next epoch."""
    sizes = np.array(sizes)
    order = Order(len(sizes), min(batch, len(sizes)), seed, sizes)
    mixed = sum(len(set(sizes[order.rows(step)])) > 1 for step in range(len(sizes) // order.batch))
    assert mixed <= len(set(sizes)) - 1 + 1


def test_sizes_come_in_a_random_order_and_with_random_company():
    sizes = np.repeat([1, 2, 3], 40)
    order = Order(120, 10, 0, sizes)
    first, second = (np.array([order.rows(step) for step in range(12 * epoch, 12 * epoch + 12)]) for epoch in (0, 1))
    assert not (np.diff(sizes[first[:, 0]]) >= 0).all()
    assert {tuple(sorted(rows)) for rows in first}.isdisjoint(tuple(sorted(rows)) for rows in second)


def test_where_all_are_of_one_size_buckets_change_nothing():
    plain, bucketed = Order(20, 3, 1), Order(20, 3, 1, np.full(20, 4))
    assert [plain.rows(step).tolist() for step in range(9)] == [bucketed.rows(step).tolist() for step in range(9)]


def test_rows_are_measured_in_blocks_as_collate_makes_them():
    for data, shape in (
        (examples([1, 15, 16, 17, 47, 48, 90]), Shape(16, 60, cls=16)),
        (examples([1, 15, 16, 17, 47, 48, 90]), Shape(16, 60, cls=None)),
        (Examples(np.array([0, 7, 0, 8, 0, 0], np.uint8), np.array([[0], [4]]), np.array([[4], [6]]),
                  np.zeros(2, np.uint8), shift=1), Shape(1, 4, cls=None, drop_background=True)),
    ):  # fmt: skip
        blocks = blocks_of_rows(data, shape)
        made = [collate(data, np.array([row]), shape).ids.shape[1] for row in range(len(data))]
        assert (blocks * shape.block).tolist() == made


def test_rows_can_be_shorter_than_whole_blocks():
    lengths = [1, 15, 16, 17, 47, 48, 90]
    whole, eights = Shape(16, 60, cls=16), Shape(16, 60, cls=16, multiple=8)
    made = [collate(examples(lengths), np.array([row]), eights).ids.shape[1] for row in range(7)]
    assert made == [8, 16, 24, 24, 48, 56, 64]
    assert whole.length == eights.length == 64
    assert (blocks_of_rows(examples(lengths), whole) == blocks_of_rows(examples(lengths), eights)).all()


@given(st.integers(0, 30))
def test_batches_can_be_picked_up_at_any_step(first_step):
    lengths = [5, 20, 35, 50] * 5
    data, shape = examples(lengths), Shape(16, 60, None)
    sizes = blocks_of_rows(data, shape)
    whole = training_batches(data, shape, Order(20, 3, 1, sizes), 0)
    for _ in range(first_step):
        next(whole)
    resumed = training_batches(data, shape, Order(20, 3, 1, sizes), first_step)
    for _ in range(8):
        assert torch.equal(next(whole).ids, next(resumed).ids)


def test_evaluation_sees_each_of_the_first_examples_once_the_shortest_first():
    data, shape = examples([40, 5, 60, 20, 5, 33, 50, 1]), Shape(16, 64, None)
    order = evaluation_order(data, shape, 6)
    assert order.tolist() == [1, 4, 3, 0, 5, 2]
    batches = list(evaluation_batches(data, shape, 2, limit=6))
    assert [batch.ids.shape[1] for batch in batches] == [16, 48, 64]
    assert torch.cat([batch.labels for batch in batches]).tolist() == data.labels[order].tolist()


def test_evaluation_of_equal_lengths_is_in_the_order_of_the_file():
    batches = list(evaluation_batches(examples([5] * 10), Shape(16, 10, None), 4, limit=7))
    assert [batch.labels.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    everything = evaluation_batches(examples([5] * 10), Shape(16, 10, None), 4, limit=100)
    assert sum(len(batch.labels) for batch in everything) == 10


def test_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="at most the number of training examples, 3; got 4"):
        Order(3, 4, 0)


def test_baselines_are_fitted_on_train_and_scored_on_test(released):
    (released / "basic_test.tsv").write_bytes(
        b"Source\tTarget\r\n( ( ( [MAX 3 ) 5 ) ] )\t5\r\n( ( ( [SM 1 ) 5 ) ] )\t6\r\n"
    )
    majority, root = baselines(load("listops", released))
    assert (majority.rule, majority.accuracy) == ("majority class", 0.0)
    assert (root.rule, root.accuracy) == ("root operator", 0.5)
