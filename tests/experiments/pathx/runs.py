import json
from dataclasses import replace

from experiments.pathx.config import Config, Stage, as_dict

STAGES = (
    Stage(size=32, contour=6, tokens=1088, lr=3e-3, steps=7, warmup=2),
    Stage(size=32, contour=9, tokens=2048, lr=2e-3, steps=4, schedule="cosine", layers="near:8,dense"),
)
TINY = Config(
    curriculum=STAGES, layers="near:6,rows:2", block=32, width=16, heads=2, mlp=16, dropout=0.1, average=0.9,
    auxiliary=0.5, precision="fp32", device="cpu", log_every=2, validate_every=4, validation_images=4,
    checkpoint_every=3, checkpoint_minutes=1e6, registers=2,
)  # fmt: skip
UNET = Config(
    curriculum=(STAGES[0], replace(STAGES[1], layers=None)), model="unet", block=32, width=64, mlp=16, average=0.9,
    precision="fp32", device="cpu", log_every=2, validate_every=4, validation_images=4, checkpoint_every=3,
    checkpoint_minutes=1e6,
)  # fmt: skip


def tensors(run):
    own = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    return own | {f"average.{name}": tensor for name, tensor in run.average.weights.items()}


def options(folder):
    stages = folder / "stages.json"
    stages.write_text(json.dumps(as_dict(TINY)["curriculum"]))
    names = ("layers", "block", "width", "heads", "mlp", "dropout", "average", "auxiliary", "precision", "device",
             "log_every", "validate_every", "validation_images", "checkpoint_every", "checkpoint_minutes",
             "registers")  # fmt: skip
    return [f"--curriculum={stages}", *(f"--{name.replace('_', '-')}={getattr(TINY, name)}" for name in names)]
