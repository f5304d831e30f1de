"""How JupyterLab reads and writes notebooks under `pkv lab`: opening one does not change it.

A lesson's file says {"name": "python"} of its language, and so is the same for every Python. JupyterLab wants there
what its kernel says of itself, down to the version: where it finds less it completes the notebook, marks it as changed,
and soon saves it. So the notebook is completed on its way to the browser, and shortened on its way back.
"""

from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

STORED = {"name": "python"}


class LessonFiles(AsyncLargeFileManager):
    """The files that JupyterLab shows, notebooks in Python with their kernel's words on the language."""

    async def get(self, *args: Any, **options: Any) -> dict[str, Any]:
        """A file or folder for the browser."""
        model: dict[str, Any] = await super().get(*args, **options)
        if is_notebook(model) and model["content"]["metadata"].get("language_info") == STORED:
            model["content"]["metadata"]["language_info"] = kernels_words()
        return model

    async def save(self, model: dict[str, Any], path: str = "") -> dict[str, Any]:
        """A file or folder from the browser. What the file said before of its language, it says again."""
        if is_notebook(model) and await self.file_exists(path):
            before = await super().get(path)
            if is_notebook(before) and before["content"]["metadata"].get("language_info") == STORED:
                model["content"]["metadata"]["language_info"] = STORED
        saved: dict[str, Any] = await super().save(model, path)
        return saved


def is_notebook(model: dict[str, Any]) -> bool:
    """Has it come with the cells of a notebook?"""
    return model.get("type") == "notebook" and model.get("content") is not None


def kernels_words() -> dict[str, Any]:
    """What a kernel of this Python says of its language."""
    return dict(IPythonKernel.language_info)
