"""`pkv doctor`: what is installed, whether kernels run here, what is missing and how to get it.

Exit code 0 where the self-test kernel runs and counts right: everything else is optional.
"""

import argparse
import textwrap
from dataclasses import asdict

from pkv.commands.arguments import add_json
from pkv.commands.diagnosis import NAMES, TOOLS, Problem, problems_of, why_cpu
from pkv.commands.machine import Machine, device_label, look
from pkv.commands.output import print_json, say

HELP = "say what is installed, whether kernels run here, and what is missing"
WIDTH = 96
INDENT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Look, judge, print; 1 if kernels do not run."""
    machine = look()
    problems = problems_of(machine)
    if args.json:
        print_json(as_dict(machine, device_label(), problems))
    else:
        say(as_text(machine, device_label(), problems))
    return 0 if machine.self_test.ok else 1


def as_dict(machine: Machine, device: str, problems: list[Problem]) -> dict[str, object]:
    """What --json prints."""
    return {
        "device": device,
        "device_reason": why_cpu(machine),
        "gpu": machine.gpu and asdict(machine.gpu),
        "platform": machine.platform,
        "versions": machine.versions,
        "interpreter": machine.interpreted,
        "flashinfer": asdict(machine.flashinfer),
        "tools": machine.tools,
        "self_test": asdict(machine.self_test),
        "problems": [asdict(problem) for problem in problems],
    }


def as_text(machine: Machine, device: str, problems: list[Problem]) -> str:
    """One line for each thing looked at, then the verdict."""
    versions, flashinfer, test = machine.versions, machine.flashinfer, machine.self_test
    build = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU-only build"
    lines = [
        line("device", device, why_cpu(machine)),
        line("kernels", *how_run(machine)),
        line(
            "self-test",
            "ok" if test.ok else "FAILED",
            f"{len(test.expected)} values, exact" if test.ok else "see below",
        ),
        "",
        *(line(name, versions[name] or "not installed", "") for name in ("pkv", "python", "numpy", "triton")),
        line("torch", versions["torch"] or "", build),
        line("flashinfer", flashinfer.version or ("" if flashinfer.reason else "installed"), flashinfer.reason),
        "",
    ]
    for name, (use, remedy, only_with_gpu) in TOOLS.items():
        label = NAMES.get(name, name)
        value = machine.tools[name]
        unused = " (not needed without a GPU)" if only_with_gpu and not machine.gpu else ""
        lines.append(line(label, value, "") if value else line(label, "missing", f"{use}{unused}: {remedy}"))
    return "\n".join([*lines, "", *verdict(machine, problems)])


def how_run(machine: Machine) -> tuple[str, str]:
    """How and where kernels run."""
    if machine.versions["triton"] is None:
        return "none", "Triton is missing"
    if machine.self_test.refused:
        return "none", "see below"
    if machine.interpreted:
        return "interpreted", "on the CPU, by Triton: right results, no speed"
    return "compiled", "for the GPU, by Triton"


def line(label: str, value: str, remark: str | None) -> str:
    """`label  value: remark`, wrapped under its value."""
    text = ": ".join(filter(None, (value, remark)))
    return textwrap.fill(
        text, WIDTH, initial_indent=label.ljust(INDENT), subsequent_indent=" " * INDENT, break_long_words=False
    )


def verdict(machine: Machine, problems: list[Problem]) -> list[str]:
    """Do kernels run, and what is wrong."""
    lines = []
    for number, problem in enumerate(problems, 1):
        for indent, text in ((f"{number}. ", problem.what), ("   -> ", problem.remedy)):
            lines.append(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent)))
    works = "Kernels run here" if machine.self_test.ok else "Kernels do NOT run here"
    count = f"problems: {len(problems)}" if problems else "nothing that this machine could use is missing"
    return [f"{works}; {count}.", *lines]
