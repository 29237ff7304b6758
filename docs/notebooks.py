"""Notebooks as pages: they are stored without outputs, run when the site is built, and shown with their outputs."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook, run in its folder, as Markdown, and the pictures that it shows by their names."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # without it Jupyter warns of where it looks for its settings
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        nbclient.NotebookClient(
            notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
        ).execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return markdown(notebook.cells, path.stem)


def markdown(cells: list[Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The cells of a notebook that has run as Markdown, and its pictures.

    >>> from types import SimpleNamespace as Cell
    >>> printed = Cell(output_type="stream", text="2\\n")
    >>> text, pictures = markdown([Cell(cell_type="code", source="print(1 + 1)", outputs=[printed])], "sum")
    >>> text.replace("`", "'")
    "'''python\\nprint(1 + 1)\\n'''\\n\\n'''text\\n2\\n'''\\n"
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.output_type == "stream":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
                continue
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![What the code above draws]({picture})")
            elif "text/html" in data:
                parts.append(f"<div>{' '.join(data['text/html'].split())}</div>")
            elif "text/plain" in data:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
