import os

import pytest

from tests.docs.pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra docs")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra docs")

NOTEBOOKS = sorted((ROOT / "docs" / "pages" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"listops", "pathx", "pattern"}


def test_notebooks_run(monkeypatch, tmp_path):
    """One after the other in one kernel, because to start one, with its imports, takes as long as a notebook."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # otherwise Jupyter warns about the place of its settings
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=300)
    client.resources = {"metadata": {"path": str(NOTEBOOKS[0].parent)}}
    with client.setup_kernel():
        for path in NOTEBOOKS:
            client.nb = nbformat.read(path, as_version=4)
            client.nb.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
            for number, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, number)
            drawn = [cell for cell in client.nb.cells if cell.source.endswith(("\nfigure", "\nImage(path)"))]
            assert drawn and all(any("image/png" in each.get("data", {}) for each in cell.outputs) for cell in drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count is not None] == []
