"""What a record says of the card: numbers are numbers or None, a version is text."""

import sys
from types import SimpleNamespace

import pytest
import torch

from pkv.bench.records import provenance
from pkv.bench.records.provenance import READINGS, gpu_facts, readings_of, version_of

NUMBERS = [name for name in READINGS if name != "driver"]
CANNOT_TELL = ["ERR!", "N/A", "[N/A]", "[Not Supported]", "Unknown Error", "[Unknown Error]", "GPU is lost", "",
               "nan", "inf", "-inf", "Infinity", "1_0", "1e3x", "0x10", "[Insufficient Permissions]"]  # fmt: skip


def answer(**changes: str) -> str:
    """What nvidia-smi would print, on one line."""
    values = dict.fromkeys(READINGS, "1980") | {"power_limit_w": "700.00", "driver": "580.159.04"} | changes
    return ", ".join(values.values()) + "\n"


@pytest.mark.parametrize("said", CANNOT_TELL)
@pytest.mark.parametrize("name", READINGS)
def test_what_nvidia_smi_cannot_tell_is_none(name, said):
    found = readings_of(answer(**{name: said}))
    assert found[name] is None
    others = {key: value for key, value in readings_of(answer()).items() if key != name}
    assert {key: value for key, value in found.items() if key != name} == others


def test_what_it_can_tell_is_a_number():
    found = readings_of(answer(temperature_c="-5", sm_mhz="345"))
    assert {name: found[name] for name in NUMBERS} == {
        "sm_mhz": 345.0, "memory_mhz": 1980.0, "most_sm_mhz": 1980.0, "power_limit_w": 700.0, "temperature_c": -5.0,
    }  # fmt: skip
    assert all(type(found[name]) is float for name in NUMBERS)


@pytest.mark.parametrize("said", ["580.10", "580.159.04", "581", "470.00", "535.104.05-grid"])
def test_a_version_is_the_text_that_it_was(said):
    assert readings_of(answer(driver=said))["driver"] == said


@pytest.mark.parametrize("said", ["", "No devices were found\n", "1, 2, 3\n", answer() + answer()])
def test_another_answer_says_nothing(said):
    assert readings_of(said) == {}


def test_the_facts_of_a_card_hold_what_was_read(monkeypatch):
    card = SimpleNamespace(name="Some card", major=9, minor=0, multi_processor_count=4, total_memory=8e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(provenance, "answer_of", lambda *command: answer(driver="580.10", sm_mhz="ERR!"))
    facts = gpu_facts(torch.device("cuda", 0))
    assert (facts["title"], facts["driver"], facts["sm_mhz"], facts["power_limit_w"]) == (
        "Some card", "580.10", None, 700.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("there", "version"), [(580.1, "580.1"), ((1, 2), "(1, 2)"), ("0.5.10", "0.5.10"), (None, None)]
)
def test_the_version_of_a_module_without_a_package_is_text(there, version, monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_package", SimpleNamespace(__version__=there))
    assert version_of("no_such_package", "no-such-package") == version
