"""`import pkv` needs neither a GPU nor any optional package. That imports go one way is import-linter's to hold."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
