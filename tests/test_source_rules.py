"""Rules that one can see in the source: the patterns of the pre-commit hooks."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]

HOOKS = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}
PATTERNS = {name: re.compile(hook["entry"]) for name, hook in HOOKS.items() if hook["language"] == "pygrep"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("hook", sorted(PATTERNS))
def test_no_file_breaks_the_rule(hook):
    files = [path for path in sources(".") if re.search(HOOKS[hook]["files"], path.relative_to(ROOT).as_posix())]
    assert len(files) > 5, "the hook looks at no files"
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PATTERNS[hook].search(line)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("hook", "line", "caught"),
    [
        ("no-block-pointers", "k = tl.make_block_ptr(k_ptr, (n, d))", True),
        ("no-block-pointers", "k_block = tl.advance(k_block, (16, 0))", True),
        ("no-block-pointers", "k = tl.load(k_ptr + offsets)", False),
        ("no-hard-coded-cuda", 'out = torch.empty(3, device="cuda")', True),
        ("no-hard-coded-cuda", "out = torch.empty(3, device = 'cuda:0')", True),
        ("no-hard-coded-cuda", 'q = q.to("cuda")', True),
        ("no-hard-coded-cuda", "q = q.cuda()", True),
        ("no-hard-coded-cuda", 'if q.device.type == "cuda":', False),
        ("no-hard-coded-cuda", "out = torch.empty(3, device=q.device)", False),
        ("no-hard-coded-cuda", "torch.cuda.is_available()", False),
        ("no-encoding-of-the-locale", "fields = json.loads(path.read_text())", True),
        ("no-encoding-of-the-locale", 'fields = json.loads(path.read_text(encoding="utf-8"))', False),
    ],
)
def test_the_pattern_catches_what_it_should(hook, line, caught):
    assert bool(PATTERNS[hook].search(line)) == caught


def test_hooks_download_nothing():
    assert all(hook["language"] in ("system", "pygrep") for hook in HOOKS.values())
