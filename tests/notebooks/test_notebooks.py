"""Every notebook runs from top to bottom on the CPU, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def _execute(path: Path) -> list[nbformat.NotebookNode]:
    """The notebook's code cells, with their outputs. Raises CellExecutionError if one fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def _has_image(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_first_tokens() -> None:
    cells = _execute(NOTEBOOKS / "01_first_tokens.ipynb")
    outputs = {cell.source: cell for cell in cells}

    def cell(start: str) -> nbformat.NotebookNode:
        return next(outputs[source] for source in outputs if start in source)

    assert "Paris" in _printed(cell("The capital of France is"))
    assert "\nlength\n" in _printed(cell("finish_reason"))
    assert _printed(cell("for step in llm.stream")).strip()
    assert sum(map(_has_image, cells)) == 3


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_is_executed_here(path: Path) -> None:
    assert path.name in Path(__file__).read_text()
