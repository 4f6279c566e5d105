"""The ledger's crash rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from race_sweeps import ledger
from race_sweeps.errors import UserError
from race_sweeps.flops import Flops
from race_sweeps.ledger import LedgerWriter, Row, Tokens


def row(step: int, phase: str, flops: int, attempt: int = 1) -> Row:
    return Row(step, phase, Flops(flops, 2 * flops, 3 * flops), Tokens(prompt=1), 8, 0.5, attempt)


def test_totals_per_phase_and_convention(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path).write([row(1, "search", 10), row(1, "learning", 30), row(2, "learning", 20), row(2, "eval", 7)])
    book = ledger.read(path)
    assert book.totals.total == 60
    assert book.totals.rho == 50 / 60
    assert book.totals.flops["search"] == Flops(10, 20, 30)
    assert book.totals.model("eval") == 7
    assert (book.lost_flops, book.attempts) == (0, 1)


def test_steps_after_the_resumed_one_are_lost_even_before_they_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path).write([row(s, p, 10) for s in (1, 2, 3) for p in ("search", "learning")])
    again = LedgerWriter(path, resume_step=1)
    assert again.attempt == 2
    book = ledger.read(path)
    assert (book.totals.total, book.lost_flops) == (20, 40)
    again.write([row(2, "search", 11, 2), row(2, "learning", 12, 2)])
    book = ledger.read(path)
    assert (book.totals.total, book.lost_flops, book.attempts) == (43, 40, 2)


def test_a_repeated_row_supersedes_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path).write([row(1, "search", 10), row(1, "search", 12)])
    book = ledger.read(path)
    assert (book.totals.total, book.lost_flops) == (12, 10)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_with_a_warning_and_cut_before_appending(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path).write([row(1, "search", 10), row(1, "learning", 20)])
    path.write_bytes(path.read_bytes()[:-cut])
    warnings: list[str] = []
    assert ledger.read(path, warnings.append).totals.total == 10
    assert len(warnings) == 1
    LedgerWriter(path, 0).write([row(1, "search", 10, 2)])
    assert [json.loads(line)["phase"] for line in path.read_text().splitlines()] == ["search", "resume", "search"]


def test_other_damage_is_an_error_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path).write([row(1, "search", 10), row(1, "learning", 20)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{torn", *lines]) + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        ledger.read(path)
    path.write_text(lines[0].replace('"model_flops":10', '"model_flops":-10') + "\n" + lines[1] + "\n")
    with pytest.raises(UserError, match="line 1: not a ledger row"):
        ledger.read(path)
