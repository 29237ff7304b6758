"""The page of the arena's rows."""

from pathlib import Path

from experiments.lra.table.rows import rendered
from experiments.measurements import Measurement, Run, write

STORED = Path(__file__).parents[4] / "experiments" / "results" / "lra"
RUN = Run("GPU", "1", {"torch": "2"}, "abc", "2026-11-29", "python")


def stored(folder, name, value, way, runs=(), **settings):
    settings |= {"runs": list(runs)} if runs else {}
    spread = {"spread_of": "seeds", "seeds": len(runs)} if len(runs) > 1 else {}
    found = Measurement(f"lra/{name}/{way}", value, 0.01 if runs else None, "%", settings, **spread)
    write(folder / f"{name.replace('/', '-')}-{way}.jsonl", RUN, [found])


def line(page, *cells):
    return next(text for text in page.splitlines() if text.startswith("| " + " | ".join(cells)))


def test_the_stored_page_is_what_the_stored_measurements_say():
    assert (STORED / "table.md").read_text() == rendered(STORED), "python -m experiments.lra record writes it"


def test_the_best_setting_is_chosen_by_validation_and_what_is_missing_is_named(tmp_path):
    stored(tmp_path, "text/accuracy/a", 80.0, "butterfly", validation=79.0)
    stored(tmp_path, "text/accuracy/b", 78.0, "local", [77.0, 78.0, 79.0], validation=81.0)
    stored(tmp_path, "text/accuracy/no-attention", 90.0, "bag")
    stored(tmp_path, "text/accuracy/a", 91.0, "local-n-window-1", validation=91.0)
    stored(tmp_path, "text/accuracy/c", 70.0, "butterfly")
    stored(tmp_path, "text/accuracy/c", 72.0, "dense")
    stored(tmp_path, "image/accuracy/a", 60.0, "dense")
    stored(tmp_path, "listops/accuracy/a", 70.0, "local", best_rule="root operator", best_rule_accuracy=35.65)
    stored(tmp_path, "listops/accuracy/no-attention", 18.0, "bag")
    stored(tmp_path, "pathfinder32/accuracy/a", 90.0, "butterfly", [91.0, 90.0, 89.0], validation=90.0)
    stored(tmp_path, "pathfinder32/accuracy/a", 91.0, "dense", validation=93.0)
    page = rendered(tmp_path)
    assert line(page, "text") == "| text | 78.0 ± 0.8 | 3 | 72.0 (70.0) | 91.0 (local-n-window-1) | 90.4 | dense |"
    assert line(page, "image") == "| image | - | 0 | - | - | 90.4 | 3 seeds, dense |"
    assert line(page, "books-matching") == "| books-matching | - | 0 | - | - | 91.3 (retrieval) | 3 seeds, dense |"
    assert line(page, "Pathfinder-32") == "| Pathfinder-32 | 90.0 ± 0.9 | 3 | 91.0 | - | 96.0 | - |"
    assert line(page, "ListOps") == "| ListOps | 70.0 | 1 | - | 35.6 (root operator) | 63.1 | 2 seeds, dense |"
    assert line(page, "average of 3") == "| average of 3 | 79.3 |  |  |  | 83.2 |  |"
    assert line(page, "average of 2 without ListOps") == "| average of 2 without ListOps | 84.0 |  |  |  | 93.2 |  |"
    assert "77.0 78.0 79.0" in line(page, "text", "b", "local")
    order = [text.split(" | ")[1] for text in page.splitlines() if text.startswith("| text | ")][1:]
    assert order == ["b", "a", "c", "c", "a", "no-attention"]


def test_a_union_of_masks_stays_in_its_cell(tmp_path):
    stored(tmp_path, "text/accuracy/a", 80.0, "local(n, window=8) | butterfly(n)")
    assert "| local(n, window=8) \\| butterfly(n) | 80.0 |" in rendered(tmp_path)


def test_a_test_of_stored_weights_stands_beside_the_figure_of_their_run(tmp_path):
    of_run = {"accuracy_of_run": 81.35, "figure": "lra/text/accuracy/a/local", "examples": 500, "of": 2000}
    stored(tmp_path, "text/tested-again/a", 80.0, "local", runs=[80.0], **of_run)
    assert "| text | a | 81.3 | 80.0 ± 0.8 | 500 of 2,000 | - |" in rendered(tmp_path)
    assert line(rendered(tmp_path), "text") == "| text | - | 0 | - | - | 90.4 | 3 seeds, dense |"
