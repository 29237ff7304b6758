import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import nn

from experiments.lm import sample
from experiments.lm.config import Config as LanguageConfig
from experiments.lm.model.transformer import LanguageModel
from experiments.lm.train import KIND as LANGUAGE
from experiments.lra import evaluate
from experiments.lra.config import as_dict as lra_dict
from experiments.lra.model.build import build_model, mask_of
from experiments.lra.tasks import TASKS
from experiments.lra.weights import KIND as LRA
from experiments.pathfinder.vectors import KIND as VECTORS
from experiments.pathfinder.vectors import load as load_vectors
from experiments.pathx import weights
from experiments.pathx.config import Config, Stage, as_dict
from experiments.training import checkpoint, tensor_files
from experiments.training.fingerprint import sha256
from tests.experiments.lra.runs import TINY

CPU = torch.device("cpu")
PATHX = Config(
    curriculum=(Stage(size=32, contour=6, tokens=2048, lr=1e-3, steps=1),), layers="dense*2", width=16, heads=2, mlp=16,
    device="cpu",
)  # fmt: skip
LM = LanguageConfig(depth=2, width=16, head_dim=8, context=64, vocabulary=256, block=16, device="cpu")
UNET = {"model": "unet", "width": 64 * 10**6, "layers": Config.layers, "heads": Config.heads}


def pathx_file(folder, **changes):
    about = {"kind": weights.KIND, "config": {**as_dict(PATHX), **changes}}
    tensor_files.write(folder / "model.safetensors", weights.build(PATHX), about)
    return folder / "model.safetensors"


def lra_file(folder, **changes):
    about = {"kind": LRA, "config": {**lra_dict(TINY), **changes}, "cost": {"steps": 1}}
    tensor_files.write(folder / "model.safetensors", build_model(TINY, TASKS["listops"], mask_of(TINY)), about)
    return folder / "model.safetensors"


def lm_file(folder, **changes):
    about = {"kind": LANGUAGE, "config": {**vars(LM), **changes}}
    model = LanguageModel(LM.sizes, [None] * LM.depth, dtype=torch.float32)
    tensor_files.write(folder / "model.safetensors", model, about)
    return folder / "model.safetensors"


def pathx_opened(path):
    return weights.load(path, sha256(path))


OPENED = {
    "pathx": (pathx_file, pathx_opened),
    "lra": (lra_file, lambda path: evaluate.opened(path, CPU)),
    "lm": (lm_file, lambda path: sample.opened(path, CPU)),
}


@pytest.mark.parametrize("name", OPENED)
def test_weights_that_fit_their_settings_are_loaded(name, tmp_path):
    made, opened = OPENED[name]
    path = made(tmp_path)
    model = opened(path)[0].state_dict()
    assert all(torch.equal(model[key], tensor) for key, tensor in load_file(path).items())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("pathx", {"width": 200_000}, r"its own settings; .* is \[.*16.*\] in the file and must be \[.*200000"),
        ("pathx", {"mlp": 10**12}, r"must be a model with the sizes of its own settings; head.0.bias is \[16\] in the"),
        ("pathx", {"width": 10**30}, "must be a model with the sizes of its own settings; got "),
        ("pathx", {"registers": 10**10}, "with its settings; got ValueError: registers must be from 0 to the block"),
        ("pathx", {"layers": "dense*900"}, r"of its own settings; got \d+ tensors for 900 layers"),
        ("pathx", {"layers": "dense*1000000000000"}, "a model must have at most 1000 layers"),
        ("pathx", {"layers": "dense"}, r"of its own settings; layers\.1.* in the file and must be missing"),
        ("pathx", {"layers": 3}, "must be a file of an experiments.pathx model with its settings; got AttributeError"),
        ("pathx", UNET, r"must be a model with the sizes of its own settings; .* must be \[48000000"),
        ("pathx", {"curriculum": 3}, "must be a file of an experiments.pathx model with its.*; got TypeError"),
        ("pathx", {"curriculum": [{}]}, "must be a file of an experiments.pathx model with its.*; got TypeError"),
        ("pathx", {"wide": 3}, "must be a file of an experiments.pathx model with its.*; got TypeError"),
        ("pathx", {"seed": 2**100}, "with its settings; got ValueError: seed must be"),
        ("lra", {"width": 200_000, "heads": 2}, r"in the file and must be \[.*200000"),
        ("lra", {"depth": 10**9}, r"got \d+ tensors for 1000000000 layers"),
        ("lra", {"max_tokens": 10**9}, "must ask for a mask of at most 16384 blocks of 16 tokens; got 1000000"),
        ("lra", {"task": "none"}, "with its settings and its cost; got ValueError: task must be one of"),
        ("lra", {"task": ["listops"]}, "with its settings and its cost; got "),
        ("lra", {"objective": "denoise"}, "must hold a model that classifies"),
        ("lm", {"width": 200_000}, r"in the file and must be \[.*200000"),
        ("lm", {"depth": 10**9}, "must have tensors for its 1000000000 layers; got"),
        ("lm", {"context": 10**12}, "must ask for a mask of at most 16384 blocks of 16 tokens"),
        ("lm", {"vocabulary": 10**10}, r"embedding.weight is \[256, 16\] in the file and must be \[10000000000, 16\]"),
        ("lm", {"pattern": "nothing"}, "whose masks its own settings describe; got ValueError: the pattern must be"),
        ("lm", {"block": 0}, "with its settings; got ValueError: block must be at least 1"),
        ("lm", {"deep": 3}, "must be a file of an lm language model with its settings; got TypeError"),
    ],
)  # fmt: skip
def test_sizes_in_a_header_are_compared_before_memory_is_taken(name, changes, said, tmp_path):
    made, opened = OPENED[name]
    path = made(tmp_path, **changes)
    with pytest.raises(ValueError, match=said) as refused:
        opened(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize(
    "about",
    ["[" * 100_000, "[1]", "{", "null", '{"kind": 3}', '{"kind": "KIND"}', '{"kind": "KIND", "config": 3, "cost": 3}'],
    ids=["deep", "list", "no JSON", "null", "number", "no settings", "no object"],
)
def test_any_header_is_refused_in_one_sentence(name, about, tmp_path):
    kind = {"pathx": weights.KIND, "lra": LRA, "lm": LANGUAGE}[name]
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"about": about.replace("KIND", kind)})
    with pytest.raises(ValueError, match=r"model.safetensors must (hold|be a file of) an ") as refused:
        OPENED[name][1](path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("contents", [b"", b"x" * 100, b"\xff" * 8, (10**15).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file_is_refused_in_one_sentence(name, contents, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"model.safetensors must be a file of an .*; got ValueError: "):
        OPENED[name][1](path)


@pytest.mark.parametrize("name", OPENED)
def test_a_cut_file_is_refused_in_one_sentence(name, tmp_path):
    made, opened = OPENED[name]
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model.safetensors must be a file of an .*; got ValueError: "):
        opened(path)


def test_a_function_that_weights_name_is_run_only_if_the_user_names_it(tmp_path):
    code = tmp_path / "evil.py"
    code.write_text("import sys\nsys.modules['was_run'] = sys\nfrom sparseflash.masks import local\n"
                    "def f(n, *, block): return local(n, window=16, block=block)\n")  # fmt: skip
    name = f"{code}:f"
    path = lra_file(tmp_path, mask=name)
    for other in (None, "dense", "numpy.f2py.__main__:main"):
        with pytest.raises(ValueError, match=r"allowed to run code: its settings name the function '.*evil.py:f"):
            evaluate.opened(path, CPU, other)
    assert "was_run" not in sys.modules
    assert evaluate.opened(path, CPU, name)[1].mask == name
    assert sys.modules.pop("was_run")


class Saved:
    def __init__(self, folder, width=4):
        torch.manual_seed(0)
        self.model = nn.Linear(width, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(width)).sum().backward()
        self.optimizer.step()
        self.folder = checkpoint.save(folder, checkpoint.Progress(3, 1.5), self.model, self.optimizer)
        (self.part,) = self.folder.glob("part-*")

    def load(self):
        return checkpoint.load(self.folder, self.model, self.optimizer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "state.json must be the state of a checkpoint; got JSONDecodeError"),
        ("[" * 100_000, "state.json must be the state of a checkpoint; got RecursionError"),
        ("[]", "state.json must be the state of a checkpoint; it is no JSON object"),
        ("{}", "state.json must be the state of a checkpoint; it has no format, step, seconds"),
        ('{"format": 1, "step": 3}', "it has no seconds"),
        ('{"format": 1, "step": 3, "seconds": 1.5, "more": 2}', "got TypeError: .*more"),
        ('{"format": 1, "step": "3", "seconds": 1.5}', "got ValueError: step '3', processes 1"),
        ('{"format": 1, "step": 3, "seconds": 1.5, "processes": null}', "processes None"),
        ('{"format": 1, "step": 3, "seconds": 1.5, "details": []}', r"details \[\]"),
    ],
)
def test_a_checkpoint_with_another_state_is_refused_in_one_sentence(text, said, tmp_path):
    saved = Saved(tmp_path)
    (saved.folder / "state.json").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        saved.load()
    assert "\n" not in str(refused.value)


def test_a_checkpoint_of_damaged_parts_is_refused_in_one_sentence(tmp_path):
    saved = Saved(tmp_path)
    whole = saved.part.read_bytes()
    for contents in (b"", whole[:-1], b"\xff" * 100):
        saved.part.write_bytes(contents)
        with pytest.raises(ValueError, match="safetensors must be a part of a checkpoint; got ValueError: "):
            saved.load()


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.weight", torch.zeros(2, 5), r"weight is \[2, 5\] in the file and must be \[2, 4\]"),
        ("model.weight", None, r"weight is missing in the file and must be \[2, 4\]"),
        ("model.more", torch.zeros(1), r"more is \[1\] in the file and must be missing"),
        ("optimizer.weight.exp_avg", torch.zeros(3), r"exp_avg of weight is \[3\] in the file and must be \[2, 4\]"),
        ("random.cpu", torch.zeros(3), "must be a checkpoint of this run; got "),
        ("random.cpu", torch.zeros(3, dtype=torch.uint8), "must be a checkpoint of this run; got RuntimeError"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(name, tensor, said, tmp_path):
    saved = Saved(tmp_path)
    tensors = load_file(saved.part)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, saved.part)
    with pytest.raises(ValueError, match=said) as refused:
        saved.load()
    assert str(saved.folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"format": 1},
        {"format": 1, "parameters": 3, "seed": 0, "stamps": ""},
        {"format": 1, "parameters": "[" * 100_000, "seed": 0, "stamps": ""},
        {"format": 1, "parameters": "{}", "seed": 0, "stamps": ""},
        {"format": 1, "parameters": "[]", "seed": 0, "stamps": ""},
    ],
)
def test_vectors_of_other_descriptions_are_refused_in_one_sentence(about, tmp_path):
    path = tmp_path / "file"
    save_arrays({"x": np.zeros(1)}, path, metadata={"about": json.dumps({"kind": VECTORS, **about})})
    with pytest.raises(ValueError, match="file must be a file of generated Pathfinder images as vectors; ") as refused:
        load_vectors(path)
    assert "\n" not in str(refused.value)


def test_parameters_whose_tables_would_fill_the_memory_are_refused():
    from tests.experiments.pathfinder.parameters import OTHER

    with pytest.raises(ValueError, match="dash_length, margin, marker_radius and thickness must be at most 128 pixels"):
        replace(OTHER, size=65_536, dash_length=16_000, seed_distance=16_300)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("experiments.pathx model", "got an experiments.pathx model: use python -m experiments.pathx"),
        ("lm language model", "got an lm language model: use python -m experiments.lm"),
        ("rm -rf model", "got 'rm -rf model'$"),
        (None, "got None$"),
    ],
)
def test_a_model_of_another_program_is_named_with_the_program(tmp_path, kind, told):
    path = tmp_path / "model.safetensors"
    tensor_files.write(path, {"a": torch.zeros(2)}, {"kind": kind})
    with pytest.raises(ValueError, match=f"must hold an experiments.lra model; {told}"):
        tensor_files.read(path, "experiments.lra model")
