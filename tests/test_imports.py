"""Imports go one way, and `import pkv` needs neither a GPU nor any optional package."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A module imports only from lines above its own; a new module takes its place here.
ORDER = [
    "fast_interpreter wording",
    "_triton captures counters locks planchecks tracers",
    "checks",
    "profiles",
    "gpus paging shapes",
    "pagedtensors planjson",
    "cache plans",
    "sharing",
    "costs",
    "readers",
    "playing",
    "simulation",
    "tile configs",
    "arguments parts",
    "merging",
    "launching",
    "ready",
    "stages.s*",
    "stages.x_flashinfer_rules",
    "stages.x_flashinfer",
    "stages.s4_adaptive",
    "stages",
    "interpreting options",
    "decoding",
    "accuracy",
    "bench",
    "viz",
    "course",
    "commands",
    "cli",
    "pkv __main__",
]
# Optional packages, and the only modules that may import them. FlashInfer never at import time.
ONLY_IN = {
    "triton": {"_triton", "bench.compiled", "cli"},  # bench.compiled cross-compiles for cards that are not here
    "flashinfer": {"stages.x_flashinfer", "cli"},
    "ipywidgets": {"viz.widgets"},
    "matplotlib": {"viz.plots"},
    "scipy": {"bench.fitting"},
}
# The reference is the specification: nothing is built on it, results are only measured against it.
SPECIFICATION = "stages.s0_reference"
READS_SPECIFICATION = {"stages", "accuracy"}


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT / "pkv").with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "pkv"


MODULES = {name_of(path): path for path in sorted((ROOT / "pkv").rglob("*.py"))}


def line_of(module: str) -> int:
    names = [module, module.split(".")[0]]
    if module.startswith("stages.s"):
        names.insert(1, "stages.s*")
    for name in names:
        for number, line in enumerate(ORDER):
            if name in line.split():
                return number
    raise AssertionError(
        f"pkv/{module.replace('.', '/')}.py has no place in ORDER (tests/test_imports.py): give it one"
    )


def imports_of(module: str, source: str, is_package: bool) -> list[tuple[str, bool]]:
    """(absolute name, at import time?) of everything imported; what only a type checker reads is left out."""
    found: list[tuple[str, bool]] = []
    package = ["pkv", *module.split(".")] if module != "pkv" else ["pkv"]
    if not is_package:
        package.pop()

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{stem}.{alias.name}"
                found.append((inner if inner.removeprefix("pkv.") in MODULES else stem, at_import))
        inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), True)
    return found


def imports_in_tree(module: str) -> list[tuple[str, bool]]:
    path = MODULES[module]
    return imports_of(module, path.read_text(), path.name == "__init__.py")


def stage_number(module: str) -> int:
    """stages.s3_workqueue -> 3"""
    return int(re.match(r"stages\.s(\d+)_", module)[1])


def against_the_order(module: str, imported: str) -> bool:
    """True where `module` must not import pkv module `imported`."""
    if imported == "pkv":
        return module != "__main__"
    if imported == SPECIFICATION:
        return module not in READS_SPECIFICATION
    if line_of(module) == line_of(imported) == line_of("stages.s*"):
        return stage_number(imported) > stage_number(module)  # read in this order, so each builds on earlier ones
    if module.split(".")[0] == imported.split(".")[0] and line_of(module) == line_of(imported):
        return False  # inside bench, viz or course
    return line_of(imported) >= line_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    own = [name.removeprefix("pkv.") for name, _ in imports_in_tree(module) if name.split(".")[0] == "pkv"]
    wrong = [name for name in own if against_the_order(module, name)]
    assert not wrong, f"pkv.{module} imports {', '.join(wrong)}; see ORDER in this file"


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_stay_in_their_module(module):
    for name, at_import in imports_in_tree(module):
        package = name.split(".")[0]
        if package in ONLY_IN:
            assert module in ONLY_IN[package], f"pkv.{module} imports {package}"
            assert not (package == "flashinfer" and at_import), "import flashinfer inside the function that needs it"


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("plans", "decoding", True),
        ("plans", "pkv", True),
        ("simulation", "stages", True),
        ("stages.s1_length_buckets", "stages.s1_split_kv", False),
        ("stages.s2_row_local", "stages.s1_split_kv", False),
        ("stages.s1_split_kv", "stages.s2_row_local", True),
        ("stages.s4_adaptive", "stages.s0_reference", True),
        ("stages.s3_workqueue", "stages.s5_stream_k", True),
        ("stages.s5_stream_k", "stages.s3_workqueue", False),
        ("stages.s4_adaptive", "stages.s5_stream_k", False),  # it chooses among all
        ("stages.s5_stream_k", "stages.s4_adaptive", True),
        ("stages.s4_adaptive", "costs", False),
        ("decoding", "stages", False),
        ("decoding", "accuracy", True),
        ("bench.sweep", "stages.s0_reference", True),
        ("accuracy", "stages.s0_reference", False),
        ("viz.widgets", "viz.plots", False),
        ("bench.sweep", "viz.plots", True),
        ("cli", "viz.plots", False),
    ],
)
def test_the_order_itself(module, imported, wrong):
    assert against_the_order(module, imported) == wrong


def test_a_module_without_a_place_is_reported():
    with pytest.raises(AssertionError, match="give it one"):
        line_of("helpers")


def test_lazy_and_relative_imports_are_seen():
    source = "from . import plans\ndef f():\n    import flashinfer\n    from .stages import s0_reference"
    assert imports_of("decoding", source, False) == [
        ("pkv.plans", True),
        ("flashinfer", False),
        ("pkv.stages.s0_reference", False),
    ]


def run_fresh(code: str, *, blocked: dict[str, str], **env: str) -> str:
    """Run `code` in a new process where importing a blocked package raises the named error."""
    prelude = f"""
        import sys
        BLOCKED = {blocked!r}

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise {{"ImportError": ImportError, "RuntimeError": RuntimeError}}[BLOCKED[name.split(".")[0]]](
                        f"{{name}} is blocked"
                    )

        sys.meta_path.insert(0, Blocker())
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


NOTHING_OPTIONAL = {
    "triton": "ImportError",
    "flashinfer": "RuntimeError",
    "ipywidgets": "ImportError",
    "matplotlib": "ImportError",
    "IPython": "ImportError",
}


def test_import_plan_and_print_without_optional_packages():
    out = run_fresh(
        """
        import torch
        import pkv

        shape = pkv.Shape(n_q_heads=4, n_kv_heads=2, head_dim=16, page_size=16, dtype=torch.float16)
        plan = pkv.plan([5, 40], shape, stage="split_kv", splits=2, gpu="rtx3060")
        print(plan)
        print(plan.items.tolist())
        """,
        blocked=NOTHING_OPTIONAL,
    )
    assert "split_kv" in out
    assert out.rstrip().splitlines()[-1].startswith("[[0, 0, ")


def test_reference_decodes_without_optional_packages():
    out = run_fresh(
        """
        import torch
        import pkv

        k = v = torch.arange(40, dtype=torch.float32).reshape(1, 40, 1, 1).expand(1, 40, 1, 16)
        cache = pkv.PagedKVCache.from_dense(k, v, [40])
        print(pkv.decode(torch.zeros(1, 2, 16), cache, stage="reference")[0, 0, 0].item())
        """,
        blocked=NOTHING_OPTIONAL,
    )
    assert float(out) == 19.5


def test_first_launch_without_triton_says_what_to_install():
    out = run_fresh(
        """
        import torch
        import pkv

        cache = pkv.PagedKVCache.from_dense(torch.zeros(1, 40, 1, 16), torch.zeros(1, 40, 1, 16), [40])
        try:
            pkv.decode(torch.zeros(1, 2, 16), cache, stage="split_kv")
        except RuntimeError as error:
            print(error)
        """,
        blocked=NOTHING_OPTIONAL,
    )
    assert "install" in out
    assert "triton" in out.lower()


def test_import_is_lean():
    out = run_fresh(
        """
        import pkv
        print(sorted({"flashinfer", "ipywidgets", "matplotlib", "IPython", "scipy"} & set(sys.modules)))
        """,
        blocked={},
    )
    assert out.strip() == "[]"


def test_every_public_name_is_there_and_documented():
    import pkv

    missing = [name for name in pkv.__all__ if not hasattr(pkv, name)]
    assert not missing
    bare = [name for name in pkv.__all__ if callable(getattr(pkv, name)) and not getattr(pkv, name).__doc__]
    assert not bare, f"no docstring: {bare}"
