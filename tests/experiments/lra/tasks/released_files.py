import pickle

import numpy as np
from PIL import Image


def write_text(folder, reviews=6):
    for split in ("train", "test"):
        for name, stars in (("neg", 2), ("pos", 9)):
            place = folder / "aclImdb" / split / name
            place.mkdir(parents=True)
            for i in range(reviews):
                (place / f"{i}_{stars}.txt").write_bytes(f"{split} {name} film {i}.<br />Très long".encode())
        (folder / "aclImdb" / split / "urls_pos.txt").write_text("not a review")


def write_retrieval(folder, pairs=12):
    place = folder / "lra_release" / "lra_release" / "tsv_data"
    place.mkdir(parents=True)
    for split in ("train", "eval", "test"):
        lines = [f"{i % 2}.0\tP{i:02}\tQ{i:02}\tabout {i} {split}\tand {'x' * (i + 1)}" for i in range(pairs)]
        (place / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n")


def cifar(count, seed):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 10, count), generator.integers(0, 256, (count, 3072), dtype=np.uint8)


def write_image(folder, form, count=4):
    place = folder / f"cifar-10-batches-{form}"
    place.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels, data = cifar(count, number)
        if form == "bin":
            np.concatenate([labels[:, None].astype(np.uint8), data], axis=1).tofile(place / f"{name}.bin")
        else:
            batch = {b"batch_label": b"x", b"labels": labels.tolist(), b"data": data, b"filenames": [b"a.png"] * count}
            (place / name).write_bytes(pickle.dumps(batch, protocol=2))


def write_pathfinder(folder, metadata="text", images=30, side=32):
    fold = folder / f"pathfinder{side}" / "curv_contour_length_14"
    (fold / "metadata").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for batch in (10, 2):
        (fold / "imgs" / str(batch)).mkdir(parents=True)
        rows = []
        for i in range(images // 2):
            path = fold / "imgs" / str(batch) / f"sample_{i}.png"
            Image.fromarray(generator.integers(0, 256, (side, side), dtype=np.uint8)).save(path)
            rows.append([f"imgs/{batch}", path.name, str(i), str(i % 2), "1.0", "14", "4", "2", "0.5", "1", "1"])
        path = fold / "metadata" / f"{batch}.npy"
        if metadata == "text":
            path.write_text("".join(" ".join(row) + "\n" for row in rows))
        else:
            np.save(path, np.array(rows, str if metadata == "array" else bytes))
    return fold
