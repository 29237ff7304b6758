import json
from dataclasses import replace

import pytest

from experiments.pathfinder.seeds import MOST_IMAGES
from experiments.pathx.config import Config, as_dict, curriculum_from, from_dict, resumed, stretched
from experiments.pathx.curricula import CURRICULA, curriculum
from tests.experiments.pathx.runs import STAGES, TINY


def test_settings_survive_their_file():
    assert from_dict(json.loads(json.dumps(as_dict(TINY)))) == TINY


def test_a_resumed_run_keeps_what_determines_it():
    assert resumed(TINY, {"validate_every": 7}).validate_every == 7
    with pytest.raises(ValueError, match="--width was 16, got 32"):
        resumed(TINY, {"width": 32})


def test_curricula_fit_their_hour_and_end():
    for name, stages in CURRICULA.items():
        assert Config(curriculum=stages).curriculum == stages
        assert sum(stage.minutes or 0 for stage in stages) <= 60, name
    assert [CURRICULA[name][-1].name for name in ("pathx", "pathx-all", "path256", "path256-all")] == [
        "128/cl14+14+9+6", "128/cl14/all pixels", "256/cl14", "256/cl14/all pixels"]  # fmt: skip


@pytest.mark.parametrize("block", [16, 64])
def test_a_step_has_as_many_tokens_as_its_images_have_numbers(block):
    most = replace(CURRICULA["smoke"][0], tokens=block * MOST_IMAGES)
    Config(curriculum=(most,), block=block)
    with pytest.raises(ValueError, match=f"a step must have at most {block * MOST_IMAGES} tokens, .* got"):
        Config(curriculum=(replace(most, tokens=most.tokens + block),), block=block)


def test_curricula_are_stretched_and_read_from_files(tmp_path):
    assert sum(stage.minutes for stage in stretched(CURRICULA["pathx"], 10)) == pytest.approx(10)
    with pytest.raises(ValueError, match="stages all have minutes"):
        stretched(STAGES, 10)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(as_dict(TINY)["curriculum"]))
    assert curriculum(str(path)) == STAGES
    path.write_text('[{"pixels": 32}]')
    with pytest.raises(ValueError, match="must be a list of stages"):
        curriculum_from(path)
    with pytest.raises(ValueError, match="must be one of smoke"):
        curriculum("path-x")
    with pytest.raises(FileNotFoundError, match="no curriculum"):
        curriculum(str(tmp_path / "none.json"))
