"""What is wrong on a machine, and the remedy. Pure: a Machine in, words out."""

from dataclasses import dataclass

from pkv.commands.machine import Machine

EXTRA = "in pkv's clone: pip install -e '.[{}]'"  # pkv is in no index
LESSONS = EXTRA.format("lessons")
TESTED = "take the versions that pkv is tested with; in its clone: pip install -c constraints.txt torch triton numpy"
OLDER_NUMPY = "this Triton's interpreter needs an older numpy: pip install 'numpy<2.5' (or a newer torch and triton)"
WIDGETS_OF = {7: 1, 8: 3}  # major of ipywidgets -> major of jupyterlab_widgets
# What each tool is for, how to get it, and whether its absence matters only where there is a GPU.
TOOLS = {
    "c_compiler": ("Triton builds its launcher with it", "apt install gcc (conda: cxx-compiler), or set CC", True),
    "cxx_compiler": ("FlashInfer builds with it", "apt install g++ (conda: cxx-compiler), or set CXX", True),
    "python_h": ("Triton builds its launcher with it", "apt install python3-dev (a conda Python has it)", True),
    "nvcc": ("FlashInfer builds with it", "conda install -c conda-forge cuda-nvcc, or the CUDA toolkit", True),
    "ninja": ("FlashInfer builds with it", "pip install ninja, and have the environment's bin on PATH", True),
    "jupyterlab": ("shows the lessons", LESSONS, False),
    "ipywidgets": ("the lessons' sliders", LESSONS, False),
    "jupyterlab_widgets": ("shows sliders in JupyterLab", LESSONS, False),
    "matplotlib": ("the lessons' plots", LESSONS, False),
}
NAMES = {"c_compiler": "C compiler", "cxx_compiler": "g++", "python_h": "Python.h"}
ONLY_FLASHINFER = ("cxx_compiler", "nvcc", "ninja")


@dataclass(frozen=True)
class Problem:
    """One thing wrong, and what to do."""

    what: str
    remedy: str


def problems_of(machine: Machine) -> list[Problem]:
    """Everything wrong that matters on this machine, the gravest first."""
    return [
        *problems_of_platform(machine),
        *problems_of_self_test(machine),
        *problems_of_gpu(machine),
        *problems_of_flashinfer(machine),
        *problems_of_tools(machine),
        *problems_of_widgets(machine),
    ]


def why_cpu(machine: Machine) -> str | None:
    """Why no GPU is used; None where one is."""
    torch = f"torch {machine.versions['torch']}"
    if machine.gpu:
        return "TRITON_INTERPRET is set, so kernels are interpreted on the CPU" if machine.interpreted else None
    if machine.torch_cuda is None:
        return f"CPU-only torch installed ({torch}): it can use no GPU"
    hidden = f", and CUDA_VISIBLE_DEVICES is {machine.visible_devices!r}" if machine.visible_devices is not None else ""
    return f"no GPU visible: {torch} is built for CUDA {machine.torch_cuda}, but finds no card{hidden}"


def problems_of_platform(machine: Machine) -> list[Problem]:
    """Systems that Triton has no wheel for."""
    if machine.platform == "win32":
        return [
            Problem(
                "this is Windows, and Triton has wheels for Linux only", "use WSL2 (`wsl --install`), or a container"
            )
        ]
    if machine.platform == "darwin":
        return [Problem("this is macOS, and Triton has wheels for Linux only", "use a container: see README.md")]
    return []


def problems_of_self_test(machine: Machine) -> list[Problem]:
    """Why kernels do not run, or count wrong."""
    test = machine.self_test
    if test.ok or (machine.platform in ("win32", "darwin") and machine.versions["triton"] is None):
        return []
    if test.got is not None:
        return [Problem(f"the self-test kernel gives {test.got}, expected {test.expected}", TESTED)]
    error = one_line(test.error or "")
    if test.refused:  # by pkv, whose messages hold their remedy
        return [Problem("the self-test kernel was not launched", error)]
    if "0-dimensional arrays" in error:  # Triton 3.6 with numpy 2.5
        return [Problem(f"the self-test kernel does not run: {error}", OLDER_NUMPY)]
    missing = [TOOLS[name][1] for name in ("c_compiler", "python_h") if machine.gpu and not machine.tools[name]]
    libcuda = "install NVIDIA's driver and run `sudo ldconfig`, or set TRITON_LIBCUDA_PATH to libcuda.so.1's folder"
    remedy = "; ".join(missing) or (libcuda if "libcuda" in error else TESTED)
    return [Problem(f"the self-test kernel does not run: {error}", remedy)]


def problems_of_gpu(machine: Machine) -> list[Problem]:
    """A card that is there and not used, or slowed; the driver's library under WSL."""
    found = []
    if machine.gpu is None and machine.driver_lists_gpu:
        if machine.torch_cuda is None:
            remedy = "install torch's CUDA build: pip install --force-reinstall torch (without the CPU index)"
        elif machine.visible_devices is not None:
            remedy = "unset CUDA_VISIBLE_DEVICES, or name a card in it"
        else:
            remedy = "update the NVIDIA driver, or install a torch built for an older CUDA"
        found.append(Problem(f"nvidia-smi lists a GPU that is not used: {why_cpu(machine)}", remedy))
    if machine.gpu is not None and machine.launches_block:
        what = "CUDA_LAUNCH_BLOCKING is set: the host waits for each kernel, so GPU times hold the gaps between them"
        found.append(Problem(what, "unset CUDA_LAUNCH_BLOCKING before measuring"))
    if machine.is_wsl and machine.torch_cuda is not None:
        if not machine.libcuda:
            found.append(Problem("WSL without libcuda.so.1", "install NVIDIA's driver on Windows, then `wsl --update`"))
        elif not any(path.endswith("libcuda.so") for path in machine.libcuda):
            link = machine.libcuda[0]
            remedy = f"sudo ln -s {link} {link.removesuffix('.1')} && sudo ldconfig"
            found.append(Problem(f"WSL has {link}, but no libcuda.so beside it, which linkers look for", remedy))
    return found


def problems_of_flashinfer(machine: Machine) -> list[Problem]:
    """FlashInfer broken, or missing where it could run."""
    state = machine.flashinfer
    if state.reason is None or state.available:  # what it cannot build is said of the tools
        return []
    if state.reason == "not installed":
        what = "FlashInfer is not installed: there is nothing to compare with"
        return [Problem(what, EXTRA.format("gpu"))] if machine.gpu else []
    if "fails" in state.reason or "takes" in state.reason:
        remedy = "pip install --force-reinstall flashinfer-python, or uninstall it; pkv works without it"
        return [Problem(f"FlashInfer: {state.reason}", remedy)]
    return []


def problems_of_tools(machine: Machine) -> list[Problem]:
    """Missing tools that would be used here."""
    found = []
    for name, (use, remedy, only_with_gpu) in TOOLS.items():
        idle = (only_with_gpu and not machine.gpu) or (name in ONLY_FLASHINFER and machine.flashinfer.reason is None)
        without_widgets = name == "jupyterlab_widgets" and machine.tools["ipywidgets"] is None
        if machine.tools[name] is None and not idle and not without_widgets:
            found.append(Problem(f"{NAMES.get(name, name)} is missing: {use}", remedy))
    return found


def problems_of_widgets(machine: Machine) -> list[Problem]:
    """ipywidgets runs beside the kernel, jupyterlab_widgets in JupyterLab: they must be of one generation."""
    kernel, lab = machine.tools["ipywidgets"], machine.tools["jupyterlab_widgets"]
    if kernel is None or lab is None:
        return []
    wanted = WIDGETS_OF.get(int(kernel.split(".")[0]))
    if wanted is None or int(lab.split(".")[0]) == wanted:
        return []
    what = f"sliders stay blank: ipywidgets {kernel} needs jupyterlab_widgets {wanted}, and {lab} is installed"
    return [Problem(what, LESSONS.replace("install", "install --upgrade"))]


def one_line(text: str) -> str:
    """Messages of compilers are long: their first 300 characters, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 300 else flat[:297] + "..."
