"""Profiles of the user's own: where they lie, which comes first, and what a broken one may not do."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch

from pkv.cards import known
from pkv.cards.files import cache_folder, checked_name, name_for, write, write_own
from pkv.cards.known import gpu_for, gpu_names, load_gpu
from pkv.cli import main
from pkv.plans.gpu import Costs, GpuProfile

TRUTH = Costs(4300, 17, item_us=2.5, launch_us=1, step_us=4, sm_gb_per_s=100)
CARD = GpuProfile("card", 90, 132)
OWN_FILE = {"title": "NVIDIA H200", "arch": 90, "n_sms": 132, "costs": dataclasses.asdict(TRUTH), "tile": 32}


def test_the_cache_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PKV_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PKV_CACHE", "~/c")
    assert cache_folder() == Path("/home/me/c")
    monkeypatch.setenv("PKV_CACHE", "c")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == tmp_path / "c"
    monkeypatch.delenv("PKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/pkv")
    for unset in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/me")
        assert cache_folder() == Path("/home/me/.cache/pkv")


def test_own_profiles_are_found_by_name_and_by_card(cache, monkeypatch):
    shipped = load_gpu("h200")
    assert gpu_for("NVIDIA H200", 90, 132) == shipped
    write_own("mine", OWN_FILE)
    known.forget_profiles()
    assert "mine" in gpu_names()
    mine = GpuProfile("mine", 90, 132, TRUTH, tile=32)
    assert load_gpu("mine") == mine
    assert load_gpu("h200") == shipped
    assert gpu_for("NVIDIA H200", 90, 132) == mine
    for other in (("NVIDIA H2000", 90, 132), ("NVIDIA H200", 90, 131), ("NVIDIA H200", 91, 132)):
        assert gpu_for(*other).costs is None
    write_own("h200", OWN_FILE | {"tile": 16})
    known.forget_profiles()
    assert load_gpu("h200") == GpuProfile("h200", 90, 132, TRUTH)
    monkeypatch.setenv("PKV_CACHE", "/nowhere")
    assert load_gpu("h200") == shipped, "another folder, other profiles"
    with pytest.raises(ValueError, match="'mine' is not a known profile; choose one of"):
        load_gpu("mine")


def test_a_slice_of_a_card_is_another_card():
    assert gpu_for("NVIDIA H200", 90, 28) == load_gpu("h200-28sm")
    assert load_gpu("h200-28sm").n_sms == 28


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"is no profile of a GPU \(no JSON: .*delete it, or write it again with `pkv calibrate --name mine`"),
        ("[]", "it has no schema number.*delete it"),
        (json.dumps(OWN_FILE), "it has no schema number.*delete it"),
        (json.dumps(OWN_FILE | {"schema": 2}), "schema 2, and this pkv reads up to 1: update pkv, or delete"),
        (json.dumps({"schema": 1, "title": "x", "arch": 90}), "KeyError: 'n_sms'.*delete it"),
        (json.dumps(OWN_FILE | {"schema": 1, "costs": {"speed": 1}}), "TypeError: .*'speed'.*delete it"),
        (json.dumps(OWN_FILE | {"schema": 1, "arch": "ninety"}), "arch must be an int.*delete it"),
        (json.dumps(OWN_FILE | {"schema": 1, "tile": 5}), "tile = 5 must be one of 16, 32, 64.*delete it"),
    ],
)  # fmt: skip
def test_a_broken_profile_is_an_error_by_name_and_one_warning_where_a_card_is_looked_for(cache, text, words):
    (cache / "gpus").mkdir(parents=True)
    (cache / "gpus" / "mine.json").write_text(text)
    words = rf"(?s){cache}/gpus/mine.json.*{words}"
    with pytest.raises(ValueError, match=words):
        load_gpu("mine")
    with pytest.warns(UserWarning, match=words):
        assert gpu_for("NVIDIA H200", 90, 132) == load_gpu("h200")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu_for("NVIDIA H200", 90, 132).name == "h200"
    known.forget_profiles()
    with pytest.warns(UserWarning, match=words):
        gpu_for("NVIDIA H200", 90, 132)


def test_a_broken_profile_of_a_shipped_ones_name_hides_it_from_nobodys_card(cache):
    (cache / "gpus").mkdir(parents=True)
    (cache / "gpus" / "h200.json").write_text("{")
    with pytest.warns(UserWarning, match=r"h200\.json is no profile"):
        assert gpu_for("NVIDIA H200", 90, 132).costs is not None
    with pytest.raises(ValueError, match=r"h200\.json is no profile"):
        load_gpu("h200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, rtx3060 is planned for")
def test_schedules_are_not_checked_for_a_card_that_cannot_be_read(cache, capsys):
    """An error of its own, not what each stage refuses each load by."""
    (cache / "gpus").mkdir(parents=True)
    (cache / "gpus" / "rtx3060.json").write_text("{")
    assert main(["bench", "--only", "equal(1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("rtx3060.json is no profile of a GPU") == 1


def test_a_cards_title_becomes_a_name_that_a_file_can_have():
    for title in ("NVIDIA \u00c4100", "GPU (engineering sample)", "\u5361", "a/../b", "x" * 200, " - "):
        assert checked_name(name_for(title)) == name_for(title)
        assert checked_name(f"{name_for(title)}-132-sms")
        assert gpu_for(title, 90, 132).name == name_for(title)


def test_a_card_without_costs_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"'card' has no costs.*measure the card with `pkv calibrate`"):
        CARD.needed_costs()


def test_a_profile_that_json_cannot_say_is_not_written(tmp_path):
    """NaN is no JSON: no other program could read the file."""
    file = write(tmp_path / "mine.json", {"tile": 16})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(file, {"tile": float("nan")})
    assert json.loads(file.read_text()) == {"tile": 16}
