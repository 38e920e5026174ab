"""What `backends` and `samplers` print."""

from __future__ import annotations

import pytest

from audit import listing
from audit.cli import main
from lumotree.backends.loader import known_backends
from lumotree.backends.sampler_loader import known_samplers


def words(lines):
    return {name: (covers, what) for name, covers, what in lines}


def test_every_backend_is_listed_with_its_surfaces_and_claims():
    found = words(listing.backend_lines())
    assert list(found) == known_backends()
    assert found["torch"][0] == "bitwise: all"
    assert found["treewy"][0] == "algebra: gdn"
    assert "native replay" in found["torch"][1]


def test_every_sampler_is_listed_with_what_it_takes():
    found = words(listing.sampler_lines())
    assert list(found) == known_samplers()
    assert found["multi-round"][0] == "fixed, sampled; trees"
    assert all(what for _, what in found.values())


@pytest.mark.parametrize(
    ("refusal", "shown"),
    [
        ("backend 'x' needs x.\nInstall it with: pip install x==1", "not here: pip install x==1"),
        ("a CUDA kernel;\nneeds a GPU", "not here: a CUDA kernel; needs a GPU"),
    ],
)
def test_what_cannot_be_loaded_says_what_it_lacks(monkeypatch, refusal, shown):
    def refuse(name):
        raise listing.InputError(refusal)

    monkeypatch.setattr(listing, "load_backend", refuse)
    monkeypatch.setattr(listing, "load_sampler", refuse)
    assert {what for _, _, what in (*listing.backend_lines(), *listing.sampler_lines())} == {shown}


@pytest.mark.parametrize(("command", "column"), [("backends", "surface and claim"), ("samplers", "takes")])
def test_the_lists_fit_80_columns(capsys, monkeypatch, command, column):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "name" and column in lines[0]
    assert max(map(len, lines)) <= 80
