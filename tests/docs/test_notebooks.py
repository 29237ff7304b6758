import os

import pytest

from tests.docs.pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra docs")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra docs")

NOTEBOOKS = sorted((ROOT / "docs" / "pages" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"listops", "pathx", "pattern"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # otherwise Jupyter warns about the place of its settings
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    drawn = [cell for cell in notebook.cells if cell.source.endswith(("\nfigure", "\nImage(path)"))]
    assert drawn and all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count is not None] == []
