"""Every example in a docstring is run: what a reader tries first must work."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import pkv

WITHOUT_KERNELS_COMPILED = "pkv.bench.fit.compiled"  # needs Triton outside its interpreter
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(pkv.__path__, "pkv.")
    if module.name not in (WITHOUT_KERNELS_COMPILED, "pkv.__main__")
)
MODULES += sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "docs").glob("*.py"))  # of the pages


@pytest.mark.parametrize("name", ["pkv", *MODULES])
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_examples_exist() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [
        test for name in ["pkv", *MODULES] for test in finder.find(importlib.import_module(name)) if test.examples
    ]
    assert len(examples) >= 10
