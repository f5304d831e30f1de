"""Files of GPU profiles: those that ship with pkv, and the user's own, which `pkv calibrate` writes.

A profile is a JSON file, NAME.json, with at least title, arch and n_sms:

    pkv/data/gpus/h200.json                        ships with pkv
    cache_folder()/gpus/nvidia-h200-132-sms.json   the user's own; takes precedence over a shipped one of its name
"""

import json
import os
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

SCHEMA = 1  # of the user's own files; a newer one is refused
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
LONGEST_TITLE = 80  # characters of a title in a name, which leaves room for the SMs


def cache_folder() -> Path:
    """Return the absolute path of pkv's measurements here: $PKV_CACHE, else $XDG_CACHE_HOME/pkv, else ~/.cache/pkv."""
    if own := os.environ.get("PKV_CACHE"):
        return Path(os.path.expanduser(own)).absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache")) / "pkv"


def checked_name(name: str) -> str:
    """Return the name if it can name a profile's file; ValueError says which characters it may have."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"name = {name!r} must be small letters, digits, '.', '_' and '-', at most 100 of them")
    return name


def name_for(title: str) -> str:
    """Make a profile's name from the title of a card or a file.

    >>> name_for("NVIDIA RTX 6000 (engineering sample)")
    'nvidia-rtx-6000-engineering-sample'
    """
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")[:LONGEST_TITLE].rstrip("-") or "gpu"


def own_file(name: str) -> Path:
    """Return the path of the user's own profile of that name, whether it exists or not."""
    return cache_folder() / "gpus" / f"{checked_name(name)}.json"


def own_names() -> list[str]:
    """Return the names of the user's own profiles, in order."""
    return names_in(cache_folder() / "gpus")


def shipped_names() -> list[str]:
    """Return the names of the profiles that ship with pkv, in order."""
    return names_in(shipped_folder())


def shipped_folder() -> Traversable:
    """Return the folder of the shipped profiles."""
    return resources.files("pkv") / "data" / "gpus"


def names_in(folder: "Traversable | Path") -> list[str]:
    """Return the names of the profiles in a folder; none if there is no folder."""
    if not folder.is_dir():
        return []
    files = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json") and NAME.fullmatch(name))


def read_shipped(name: str) -> dict[str, Any]:
    """Read the file of a shipped profile."""
    found: dict[str, Any] = json.loads((shipped_folder() / f"{name}.json").read_text(encoding="utf-8"))
    return found


def read_own(name: str) -> dict[str, Any]:
    """Read the user's own file; if it is broken or newer than this pkv, ValueError names it and says what to do."""
    file = own_file(name)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise broken(file, name, error.strerror or str(error)) from None
    except ValueError as error:
        raise broken(file, name, f"no JSON: {error}") from None
    if not isinstance(found, dict) or type(found.get("schema")) is not int:
        raise broken(file, name, "it has no schema number")
    if found["schema"] > SCHEMA:
        raise ValueError(
            f"{file} is written in schema {found['schema']}, and this pkv reads up to {SCHEMA}: update pkv, or delete "
            f"the file, or write it again with `pkv calibrate --name {name}`"
        )
    return found


def broken(file: Path, name: str, reason: str) -> ValueError:
    """Make the error which says that a user's own file cannot be read, and why."""
    return ValueError(
        f"{file} is no profile of a GPU ({reason}): delete it, or write it again with `pkv calibrate --name {name}`"
    )


def write_own(name: str, fields: dict[str, Any]) -> Path:
    """Write one of the user's own profiles and return its path."""
    file = own_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write(file, {"schema": SCHEMA} | fields)


def write(file: Path, fields: dict[str, Any]) -> Path:
    """Write a profile and return its path. A reader sees the old file or the new one, never a part of one."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(json.dumps(fields, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(file)
    return file
