import io
import pickle
import re
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.lra.config import Config
from experiments.lra.data.batches import collate
from experiments.lra.tasks import TASKS, Options, image, load
from experiments.lra.tasks.image import grey
from experiments.lra.train import Run
from tests.experiments.lra.tasks.released_files import cifar, write_image, write_pathfinder, write_retrieval, write_text

TINY = Config(
    mask="local", block=16, window=16, depth=1, width=32, heads=2, mlp=32, batch=4, steps=6, eval_every=3,
    checkpoint_every=3, log_every=1, lr=1e-3, warmup=2, device="cpu",
)  # fmt: skip


WRITERS = {
    "text": write_text,
    "retrieval": write_retrieval,
    "image": lambda folder: write_image(folder, "bin"),
    "pathfinder32": write_pathfinder,
}


@pytest.mark.parametrize("task", WRITERS)
def test_a_run_on_the_released_format_pauses_resumes_and_ends_as_if_it_had_not(task, tmp_path):
    WRITERS[task](tmp_path)
    data = load(task, tmp_path)
    assert not data.generated
    config = replace(TINY, task=task, max_tokens=40)
    whole = Run(config, data, tmp_path / "whole")
    metrics = whole.train()
    assert metrics["test_examples"] == len(data.test)
    assert [each["rule"] for each in metrics["baselines"]] == ["majority class"]
    Run(config, data, tmp_path / "parts").train(pause=lambda step: step == 4)
    resumed = Run(config, load(task, tmp_path), tmp_path / "parts", resume=True)
    assert resumed.state.step == 4
    assert resumed.train()["test_loss"] == metrics["test_loss"]
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_reviews_alternate_and_are_read_as_bytes(tmp_path):
    write_text(tmp_path)
    data = load("text", tmp_path)
    assert data.train.labels.tolist() == [0, 1] * 6
    assert bytes(data.train.sequence(1)) == "train pos film 0.<br />Très long".encode()
    assert len(data.val) == len(data.test) == 12
    batch = collate(data.train, np.array([1]), replace(TINY, task="text", pool="cls").shape)
    assert batch.ids[0, 0] == TASKS["text"].cls == 257
    assert batch.ids[0, 1] == ord("t") + 1


def test_pairs_are_two_sequences_each_cut_to_four_thousand_bytes(tmp_path):
    write_retrieval(tmp_path)
    place = tmp_path / "lra_release" / "lra_release" / "tsv_data"
    (place / "new_aan_pairs.test.tsv").write_text("1.0\ta\tb\t" + "x" * 5000 + "\tshort\n")
    data = load("retrieval", tmp_path)
    assert data.train.towers == 2
    assert data.train.labels.tolist() == [0, 1] * 6
    assert (bytes(data.train.sequence(3, 0)), bytes(data.train.sequence(3, 1))) == (b"about 3 train", b"and xxxx")
    assert (len(data.test.sequence(0, 0)), len(data.test.sequence(0, 1))) == (4000, 5)
    batch = collate(data.train, np.array([3, 0]), replace(TINY, pool="mean", max_tokens=20).shape)
    assert batch.ids.shape == (4, 16) and batch.labels.tolist() == [1, 0]
    assert bytes((batch.ids[1, :8] - 1).tolist()) == b"and xxxx"
    assert batch.lengths.tolist() == [13, 8, 13, 5]


@pytest.mark.parametrize("line", ["1\ta\tb\tc\td", "1.0\ta\tb\tc", "0.0\ta\tb\t\td", "label\tid1\tid2\ttext1\ttext2"])
def test_a_line_that_is_no_pair_is_named(line, tmp_path):
    write_retrieval(tmp_path)
    place = tmp_path / "lra_release" / "lra_release" / "tsv_data"
    with open(place / "new_aan_pairs.eval.tsv", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 13 of .*new_aan_pairs.eval.tsv must be a label"):
        load("retrieval", tmp_path)


def test_both_forms_of_cifar_give_the_same_images(tmp_path):
    write_image(tmp_path, "bin")
    write_image(tmp_path, "py")
    binary, python = load("image", tmp_path / "cifar-10-batches-bin"), load("image", tmp_path / "cifar-10-batches-py")
    assert (len(binary.train), len(binary.val), len(binary.test)) == (18, 2, 4)
    for ours, theirs in ((binary.train, python.train), (binary.val, python.val), (binary.test, python.test)):
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert all(ours.sequence(i).tolist() == theirs.sequence(i).tolist() for i in range(len(ours)))
    labels, data = cifar(4, 0)
    assert binary.train.labels[:4].tolist() == labels.tolist()
    want = grey(data.reshape(4, 3, 1024))[2]
    assert binary.train.sequence(2).tolist() == want.tolist()


def test_grey_is_the_weighted_sum_of_the_colours():
    colours = np.array([[[0, 255, 255, 0, 0, 100]], [[0, 255, 0, 255, 0, 150]], [[0, 255, 0, 0, 255, 200]]], np.uint8)
    # TensorFlow's rgb_to_grayscale: floor(255.5 * weighted sum / 255).
    assert grey(colours.transpose(1, 0, 2))[0].tolist() == [0, 255, 76, 149, 29, 141]


class Bomb:
    def __reduce__(self):
        return (sys.exit, (3,))


def with_batch(folder, content):
    write_image(folder, "py")
    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (pickle.dumps(Bomb()), "sys.exit"),
        (b"cnumpy.f2py.__main__\ndtype\n.", "numpy.f2py.__main__.dtype"),
        (b"cnumpy.nothing\nndarray\n.", "numpy.nothing.ndarray"),
        (b"cnumpy.f2py.__main__\n_reconstruct\n.", "numpy.f2py.__main__._reconstruct"),
        (b"cnumpy\n_reconstruct\n.", "numpy._reconstruct"),
        (b"\x80\x04\x8c\x0bnumpy.tests\x8c\x05dtype\x93.", "numpy.tests.dtype"),
    ],
)
def test_a_pickle_that_asks_for_code_is_refused_and_nothing_is_imported(content, asked, tmp_path):
    before = set(sys.modules)
    with pytest.raises(ValueError, match=f"data_batch_3 is not a CIFAR-10 batch: it asks for {re.escape(asked)}, "):
        load("image", with_batch(tmp_path, content))
    assert not {name for name in set(sys.modules) - before if name.startswith(("numpy.f2py", "numpy.tests"))}


def nested(levels):
    made = [1]
    for _ in range(levels):
        made = [made, made]
    return made


PIXELS = np.zeros((1, 3072), np.uint8)
NO_BATCHES = [
    *(
        b"\x80\xff\x00",
        b"\x80\x03X\x02\x00\x00\x00\xff\xfe.",
        b"",
        b"\x80\x02",
        b"\x80\x02}",
        b"\x80\x02e.",
        b"\x80\x02b.",
    ),
    *(b"\x80\x02h\x07.", b"\x80\x02]]s.", b"(" * 10**5 + b"t" * 10**5 + b".", b"\x80\x02}]" + b"\x85" * 10**5 + b"Ns."),
    b"\x80\x04\x8d" + (2**40).to_bytes(8, "little"),
    b"\x80\x02]r\xff\xff\xff\x7f.",
    pickle.dumps({b"labels": [3], b"data": PIXELS})[:2000],
    pickle.dumps({b"labels": [3], b"data": PIXELS.astype(np.int8)}),
    pickle.dumps({b"labels": [3], b"data": np.asfortranarray(np.zeros((2, 3072), np.uint8))}),
    pickle.dumps({b"labels": [], b"data": PIXELS[:0]}),
    pickle.dumps({b"labels": [3, 4], b"data": PIXELS}),
    pickle.dumps({b"labels": [3], b"data": nested(60)}),
    pickle.dumps({b"labels": nested(60), b"data": PIXELS}),
    pickle.dumps({b"labels": [10**400], b"data": PIXELS}),
    pickle.dumps({b"labels": 3, b"data": PIXELS}),
    pickle.dumps([b"labels", b"data"]),
]


@pytest.mark.parametrize("content", NO_BATCHES, ids=range(len(NO_BATCHES)))
def test_a_pickle_that_is_no_batch_is_named(content, tmp_path):
    with pytest.raises(ValueError, match=r"data_batch_3 (is not a CIFAR-10 batch|must hold uint8 images)"):
        load("image", with_batch(tmp_path, content))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_of_all_writers_are_read(protocol, tmp_path):
    labels, data = cifar(300, 0)
    batch = {
        "batch_label": None,
        b"labels": labels.tolist(),
        b"data": data,
        b"filenames": [b"%d.png" % i for i in range(300)],
    }
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol=protocol))
    classes, colours = image.read_python(tmp_path / "batch")
    assert classes.tolist() == labels.tolist() and np.array_equal(colours.reshape(300, -1), data)


# Python 2 and NumPy 1 wrote the released files.
OF_PYTHON_2 = (
    b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(K\x06K\teU\x04dataq\x06"
    b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t(K\x01K\x02M\x00\x0c\x86cnumpy\n"
    b"dtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00%btbU\tfilenames"
    b"q\x0c]q\r(U\x05a.pngU\x05b.pngeu."
)


def test_a_file_of_python_2_is_read(tmp_path):
    data = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    (tmp_path / "batch").write_bytes(OF_PYTHON_2 % data.tobytes())
    classes, colours = image.read_python(tmp_path / "batch")
    assert classes.tolist() == [6, 9] and np.array_equal(colours.reshape(2, -1), data)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "records of 3073 bytes; it has 0"), (b"x" * 3000, "it has 3000"), (b"\xff" * 3073, "0 to 9; got 255")],
)  # fmt: skip
def test_a_damaged_batch_is_named(content, message, tmp_path):
    write_image(tmp_path, "bin")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("image", tmp_path)


@pytest.mark.parametrize("metadata", ["text", "array", "bytes"])
def test_pathfinder_reads_both_forms_of_metadata_in_the_order_of_numbers(metadata, tmp_path):
    fold = write_pathfinder(tmp_path, metadata)
    data = load("pathfinder32", tmp_path, Options(split="ordered"))
    assert (len(data.train), len(data.val), len(data.test)) == (24, 3, 3)
    first, last = (np.asarray(Image.open(fold / "imgs" / name)) for name in ("2/sample_0.png", "10/sample_14.png"))
    assert data.train.sequence(0).tolist() == first.reshape(-1).tolist()
    assert data.test.sequence(2).tolist() == last.reshape(-1).tolist()
    assert data.train.labels[:15].tolist() == [i % 2 for i in range(15)]


def test_the_shuffled_split_is_that_of_random_split_with_seed_42(tmp_path):
    write_pathfinder(tmp_path)
    ordered, shuffled = (load("pathfinder32", tmp_path, Options(split=split)) for split in ("ordered", "shuffled"))
    whole = [s.sequence(i).tolist() for s in (ordered.train, ordered.val, ordered.test) for i in range(len(s))]
    parts = torch.utils.data.random_split(whole, [24, 3, 3], generator=torch.Generator().manual_seed(42))
    for part, examples in zip(parts, (shuffled.train, shuffled.val, shuffled.test), strict=True):
        assert list(part) == [examples.sequence(i).tolist() for i in range(len(examples))]


def test_the_empty_image_of_the_release_is_left_out(tmp_path):
    fold = write_pathfinder(tmp_path)
    (fold / "imgs" / "10" / "sample_7.png").write_bytes(b"")
    data = load("pathfinder32", tmp_path)
    assert len(data.train) + len(data.val) + len(data.test) == 29


def png_header(side):
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\0\0\0\0"
    chunks = [(13).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + bytes(4) + b"IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")


def npy_header(dtype, shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda fold: (fold / "imgs/2/sample_3.png").unlink(), FileNotFoundError, "sample_3.png, which does not exist"),
        (lambda fold: (fold / "imgs/2/sample_3.png").write_bytes(b"no png"), ValueError, "32 x 32; got Unident"),
        (
            lambda fold: Image.new("L", (64, 64)).save(fold / "imgs/2/sample_3.png"),
            ValueError,
            "PNG image of 32 x 32; got L",
        ),
        (
            lambda fold: (fold / "imgs/2/sample_3.png").write_bytes(png_header(60_000)),
            ValueError,
            "32 x 32; got Decomp",
        ),
        (lambda fold: (fold / "imgs/2/sample_3.png").write_bytes(png_header(8_000)), ValueError, r"got L \[8000, 8000"),
        (
            lambda fold: (fold / "imgs/2/sample_3.png").write_bytes(png_header(32)),
            ValueError,
            "PNG image of 32 x 32; got",
        ),
        (
            lambda fold: (fold / "imgs/2/sample_3.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n"),
            ValueError,
            "got Unident",
        ),
        (lambda fold: (fold / "metadata/2.npy").write_bytes(npy_header("<U4", (2**40, 11))), ValueError, "of strings"),
        (lambda fold: (fold / "metadata/2.npy").write_bytes(npy_header("<f8", (0, 11))), ValueError, "of strings"),
        (lambda fold: (fold / "metadata/2.npy").write_bytes(npy_header("<U4", ())), ValueError, "of strings"),
        (lambda fold: (fold / "metadata/2.npy").write_text("imgs/2 a.png 0 maybe\n"), ValueError, "line 1 of .*label"),
        (lambda fold: (fold / "metadata/2.npy").write_text("../../.. a.png 0 1\n"), ValueError, "names a file outside"),
        (lambda fold: (fold / "metadata/2.npy").write_text("/etc a.png 0 1\n"), ValueError, "names a file outside"),
        (lambda fold: (fold / "metadata/2.npy").write_bytes(b"imgs/2 \xff 0 2\n"), ValueError, "line 1 of .*label"),
        (lambda fold: (fold / "metadata/all.npy").write_text(""), ValueError, "called <number>.npy; got .*all.npy"),
        (lambda fold: np.save(fold / "metadata/2.npy", np.array([["a", 1]], object)), ValueError, "array of strings"),
    ],
    ids=[
        "missing",
        "no image",
        "another size",
        "bomb",
        "large",
        "no pixels",
        "another format",
        "no strings of many",
        "numbers",
        "one string",
        "no label",
        "outside",
        "absolute",
        "no text",
        "no number",
        "objects",
    ],
)
def test_what_is_wrong_with_the_images_is_named(damage, error, message, tmp_path):
    damage(write_pathfinder(tmp_path))
    with pytest.raises(error, match=message):
        load("pathfinder32", tmp_path)


def test_an_empty_line_is_no_image(tmp_path):
    fold = write_pathfinder(tmp_path)
    with open(fold / "metadata/2.npy", "a") as file:
        file.write("\n")
    assert len(load("pathfinder32", tmp_path, Options(split="ordered")).train) == 24


def test_images_may_lie_on_another_disk(tmp_path):
    fold = write_pathfinder(tmp_path)
    shutil.move(fold / "imgs", tmp_path / "elsewhere")
    (fold / "imgs").symlink_to(tmp_path / "elsewhere")
    assert len(load("pathfinder32", tmp_path).train) > 0


@pytest.mark.parametrize("given", [".", "lra_release", "lra_release/lra_release"])
def test_of_the_two_folders_pathfinder128_the_inner_one_is_read(given, tmp_path):
    outer = write_pathfinder(tmp_path / "lra_release", side=128, images=10)
    inner = write_pathfinder(tmp_path / "lra_release/lra_release", side=128, images=10)
    assert load("pathfinder128", tmp_path / given).folder == inner
    assert load("pathfinder128", outer).folder == outer
    shutil.rmtree(inner)
    if given != "lra_release/lra_release":
        assert load("pathfinder128", tmp_path / given).folder == outer


def test_images_beside_a_copy_of_the_release_are_ambiguous(tmp_path):
    own = write_pathfinder(tmp_path, images=10)
    released = write_pathfinder(tmp_path / "lra_release", images=10)
    with pytest.raises(ValueError, match=rf"must hold one .*; got {own} and {released}: name one of them"):
        load("pathfinder32", tmp_path)
    shutil.rmtree(released)
    released.symlink_to(own)
    assert load("pathfinder32", tmp_path).folder == own


@pytest.mark.parametrize("options", [Options(difficulty="brutal"), Options(split="random")])
def test_unknown_options_are_refused(options, tmp_path):
    write_pathfinder(tmp_path)
    with pytest.raises(ValueError, match="must be one of"):
        load("pathfinder32", tmp_path, options)


@pytest.mark.parametrize("task", [name for name in TASKS if name != "listops"])
def test_missing_files_are_named_with_what_to_do(task, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; (place|unpack|pass)"):
        load(task, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"; (place|unpack|pass)"):
        load(task, tmp_path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    from experiments.pathfinder.generate import Settings, generate
    from experiments.pathfinder.parameters import lra

    return generate(Settings(lra(32, 6), 40), tmp_path_factory.mktemp("drawn"), workers=1)


def test_generated_images_are_rendered_labelled_and_told_with_their_baselines(drawn, tmp_path, monkeypatch):
    from experiments.pathfinder.cnn import results
    from experiments.pathfinder.render import render
    from experiments.pathfinder.vectors import load as load_vectors

    data = load("pathfinder32", drawn, Options(difficulty="easy", split="ordered"))
    vectors = load_vectors(drawn)
    assert data.generated
    assert (len(data.train), len(data.val), len(data.test)) == (32, 4, 4)
    assert np.array_equal(data.val.sequence(1).reshape(32, 32), render(vectors)[33])
    assert data.val.labels.tolist() == vectors.labels[32:36].tolist()
    config = replace(TINY, task="pathfinder32", difficulty="easy", background="drop", positions="rotary2d", steps=2)
    monkeypatch.setattr(results, "STORED", tmp_path)
    path = tmp_path / "cnn-pathfinder32-cl6.json"
    path.write_text('{"rule": "small 2-D CNN", "accuracy": 0.625}')
    metrics = Run(config, data, tmp_path / "run").train()
    assert metrics["generated_data"]
    rules = {each["rule"]: each["accuracy"] for each in metrics["baselines"]}
    assert list(rules) == ["majority class", "marker distance", "distance and end dashes", "small 2-D CNN"]
    assert rules["small 2-D CNN"] == 0.625
    path.unlink()
    assert "small 2-D CNN" not in dict(data.shortcuts())


def test_where_generated_images_lie_is_kept_in_full(drawn, monkeypatch):
    monkeypatch.chdir(drawn.parent)
    assert load("pathfinder32", Path(drawn.name), Options(difficulty="easy")).folder == drawn.resolve()


def test_generated_images_are_found_in_their_folder_where_they_are_alone(drawn, tmp_path):
    options = Options(difficulty="easy")
    (tmp_path / drawn.name).symlink_to(drawn)
    assert load("pathfinder32", tmp_path, options).folder == drawn.resolve()
    with pytest.raises(ValueError, match="images of pathfinder32 for --difficulty easy; got --difficulty intermediate"):
        load("pathfinder32", tmp_path, Options(difficulty="intermediate"))
    with pytest.raises(FileNotFoundError, match="holds no pathfinder64/curv_contour_length_9"):
        load("pathfinder64", tmp_path, Options(difficulty="intermediate"))
    (tmp_path / drawn.name.replace("seed0", "seed1")).symlink_to(drawn)
    with pytest.raises(
        ValueError, match=r"must hold one such file; got pathfinder32-cl6-\S+seed0\S+, pathfinder32-cl6"
    ):
        load("pathfinder32", tmp_path, options)


def test_generated_images_of_another_size_or_difficulty_are_refused(drawn):
    with pytest.raises(ValueError, match=r"needs images of 32 pixels with paths of 14 dashes; .* has 32 pixels and 6"):
        load("pathfinder32", drawn)
    with pytest.raises(ValueError, match="needs images of 64 pixels"):
        load("pathfinder64", drawn, Options(difficulty="easy"))


def test_exported_images_are_read_as_generated(drawn, tmp_path):
    from experiments.pathfinder.release import export
    from experiments.pathfinder.vectors import load as load_vectors

    export(load_vectors(drawn), tmp_path)
    vectors, files = (load("pathfinder32", place, Options("easy")) for place in (drawn, tmp_path))
    assert files.generated
    for ours, theirs in ((vectors.train, files.train), (vectors.test, files.test)):
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert all(np.array_equal(ours.sequence(i), theirs.sequence(i)) for i in range(len(ours)))


def test_the_cache_is_used_and_follows_the_files(tmp_path):
    fold = write_pathfinder(tmp_path)
    load("pathfinder32", tmp_path)
    first = {path.name for path in (fold / "tokens").iterdir()}
    load("pathfinder32", tmp_path)
    assert {path.name for path in (fold / "tokens").iterdir()} == first
    path = fold / "metadata" / "2.npy"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    data = load("pathfinder32", tmp_path)
    assert len(data.train) + len(data.val) + len(data.test) == 29


def test_small_heads_are_computed_as_they_are():
    """The arena's heads of 4 and 8 features are padded with zeros."""
    from experiments.training.layers.transformer import SelfAttention
    from sparseflash import attention, masks

    torch.manual_seed(0)
    layer = SelfAttention(32, 4, 4, 0.0, False)
    q, k, v = torch.randn(3, 2, 4, 32, 4)
    mask = masks.local(32, window=8, block=16)
    want = attention(q.double(), k.double(), v.double(), mask, backend="reference")
    torch.testing.assert_close(layer.mix(q, k, v, mask).double(), want, atol=1e-6, rtol=1e-5)


def test_small_heads_are_checked_as_the_model_calls_them(monkeypatch):
    from experiments.lra import exactness
    from experiments.training.layers import attention as layer
    from sparseflash import attention, masks

    def kernel(q, *rest, **options):
        assert q.shape[-1] >= 16
        return attention(q, *rest, **options)

    monkeypatch.setattr(layer.sparseflash, "attention", kernel)
    q, k, v, dout = torch.randn(4, 2, 4, 32, 4)
    call = exactness.Captured(q, k, v, dout, masks.local(32, window=8, block=16))
    for ours, exact in zip(exactness.sparse(call), exactness.dense(call, torch.float64), strict=True):
        assert exactness.error(ours, exact) < 1e-5
