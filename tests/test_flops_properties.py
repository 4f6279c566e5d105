"""Properties of the accounting, the ledger and the planner that hold for every input."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from race_sweeps import ledger
from race_sweeps.allocate import LANDING, Allocator
from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError
from race_sweeps.flops import Flops, ModelShape, PolicyFlops, pairs
from race_sweeps.ledger import PHASES, LedgerWriter, Row, Tokens
from race_sweeps.plan import Plan, costs, plan
from tests.flops_cases import TINY, config_of

SHAPES = {name: ModelShape.from_config(config_of(name), name) for name in TINY}
lengths = st.integers(1, 200)


@st.composite
def policies(draw: st.DrawFn) -> PolicyFlops:
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    targets = tuple(draw(st.lists(st.sampled_from(shape.adaptable), unique=True)))
    return PolicyFlops(shape, draw(st.integers(1, 8)), targets) if targets else PolicyFlops.full(shape)


# --- formulas --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 40))
def test_pairs_are_what_a_loop_counts(start: int, more: int, window: int | None) -> None:
    positions = range(start + 1, start + more + 1)
    assert pairs(start, start + more, window) == sum(min(p, window or p) for p in positions)


@given(policies(), lengths, lengths, st.data())
def test_a_forward_is_the_sum_of_its_parts(
    policy: PolicyFlops, prompt: int, completion: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, prompt + completion))
    whole = policy.forward(0, prompt + completion, completion)
    assert whole == policy.forward(0, cut, 0) + policy.forward(cut, prompt + completion, completion)
    assert policy.train(prompt, completion) == whole + policy.backward(prompt + completion, completion)
    # decoding with a cache adds up to one pass over the same positions
    steps = sum(policy.forward(prompt + i, prompt + i + 1, 1) for i in range(completion - 1))
    assert policy.search(prompt, completion) == policy.forward(0, prompt, 1) + steps


@given(policies(), lengths, lengths, st.integers(0, 3), st.integers(0, 3))
def test_longer_never_costs_less(policy: PolicyFlops, prompt: int, completion: int, more: int, longer: int) -> None:
    for count in (policy.search, policy.train, policy.score):
        assert count(prompt, completion) <= count(prompt + more, completion + longer)
    if prompt > 1:
        assert policy.search(prompt, completion, cached=1) < policy.search(prompt, completion)
    executed = policy.train_executed(2, prompt, completion)
    assert executed <= policy.train_executed(2 + more, prompt + longer, completion)
    assert executed <= policy.train_executed(2, prompt, completion, checkpointing=True)
    assert policy.search_executed([prompt], [completion]) <= policy.search_executed(
        [prompt + more], [completion + longer]
    )


@given(policies(), st.lists(st.tuples(lengths, lengths), min_size=1, max_size=8), st.randoms())
def test_the_order_of_completions_does_not_matter(
    policy: PolicyFlops, rows: list[tuple[int, int]], rng: object
) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    for count in (policy.search, policy.train, policy.score):
        assert sum(count(p, t) for p, t in rows) == sum(count(p, t) for p, t in shuffled)
    assert policy.search_executed(*zip(*rows, strict=True)) == policy.search_executed(*zip(*shuffled, strict=True))


# --- ledger ----------------------------------------------------------------------------------------------------------


def row(step: int, phase: str, flops: int) -> Row:
    return Row(step, phase, Flops(flops, 2 * flops, 3 * flops), Tokens(completion=flops), 1, 0.5)


rows_of = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(PHASES), st.integers(0, 10**20)), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(rows_of, st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=4))
def test_the_ledger_survives_every_cut_and_replay(
    attempts: list[tuple[list[tuple[int, str, int]], float, int]],
) -> None:
    """Attempts that write, lose power at any byte, and resume at any step: what is on disk is counted exactly once, as
    current or as lost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        current: dict[tuple[int, str], int] = {}
        lost: list[int] = []
        for number, (written, cut, resume) in enumerate(attempts):
            writer = LedgerWriter(path, resume_step=resume)
            if number and writer.attempt > 1:
                lost += [flops for (step, _), flops in current.items() if step > resume]
                current = {key: flops for key, flops in current.items() if key[0] <= resume}
            begun = path.stat().st_size if path.exists() else 0
            for item in written:
                writer.write([row(*item)])
            size = path.stat().st_size if path.exists() else 0
            keep = begun + round(cut * (size - begun))
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(keep)
            complete = path.read_bytes()[begun:].count(b"\n") if path.exists() else 0
            for step, phase, flops in written[:complete]:
                if (step, phase) in current:
                    lost.append(current[step, phase])
                current[step, phase] = flops
            book = ledger.read(path)
            assert {(r.step, r.phase): r.flops.model for r in book.rows} == current
            assert sorted(r.flops.model for r in book.lost) == sorted(lost)
            totals = book.totals
            assert totals.total == sum(flops for (_, phase), flops in current.items() if phase != "eval")
            assert sum(totals.rows.values()) == len(current)
            assert all(r.flops == Flops(f, 2 * f, 3 * f) for r in book.rows for f in [r.flops.model])


@given(rows_of, st.randoms())
def test_replayed_rows_count_once_in_any_order(written: list[tuple[int, str, int]], rng: object) -> None:
    shuffled = list(written)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        LedgerWriter(path).write([row(*item) for item in shuffled])
        book = ledger.read(path)
        assert len(book.rows) == len({item[:2] for item in written})
        everything = sum(r.flops.model for r in (*book.rows, *book.lost))
        assert everything == sum(flops for _, _, flops in written)
        assert {(r.step, r.phase): r.flops.model for r in book.rows} == {(s, p): f for s, p, f in shuffled}


# --- planner ---------------------------------------------------------------------------------------------------------


@cache
def base() -> RunConfig:
    from race_sweeps.compose import compose_points

    return compose_points(["stage=A", "model=tiny-s", "sweep=test"], multirun=False).points[0][1]


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    config = base()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=draw(st.sampled_from(["tiny-s", "tiny-m", "tiny-l"]))),
        budget=dataclasses.replace(
            config.budget, flops=draw(st.floats(1e8, 3e11)), rungs=draw(st.sampled_from([[1.0], [0.25, 0.5, 1.0]]))
        ),
        update_fraction=dataclasses.replace(config.update_fraction, rho=draw(st.none() | st.floats(0.2, 0.97))),
        rollout=dataclasses.replace(
            config.rollout, expected_prompt=draw(st.integers(2, 40)), expected_completion=draw(st.integers(1, 60))
        ),
        train=dataclasses.replace(
            config.train,
            group=draw(st.sampled_from([4, 8, 16])),
            prompts=draw(st.integers(1, 64)),
            beta=draw(st.sampled_from([0.0, 0.1])),
            old_logprobs=draw(st.sampled_from(["sampler", "trainer"])),
        ),
    )


def replay(config: RunConfig) -> Iterator[Allocator]:
    """Run the plan's allocator on completions of exactly the expected lengths; yields it before each generation."""
    from race_sweeps.models import policy_flops

    cost = costs(config, policy_flops(config))
    planned = plan(config)
    allocator = Allocator(
        rho=config.update_fraction.rho,
        rungs=planned.rungs,
        group=config.train.group,
        max_groups=config.train.prompts,
        max_passes=config.update_fraction.max_passes,
        tolerance=config.budget.tolerance,
        costs=cost,
    )
    while not allocator.finished:
        yield allocator
        step, rows = allocator.generations, allocator.next_groups() * config.train.group
        allocator.record(Row(step, "search", Flops(rows * cost.search), Tokens(), rows, 0.0))
        allocator.record(Row(step, "reward", Flops(rows * cost.reward), Tokens(), rows, 0.0))
        reference = rows * cost.reference
        passes = allocator.row_passes([cost.train] * rows, [cost.old] * rows, reference)
        learning = passes * cost.train + min(passes, rows) * cost.old + reference
        allocator.record(Row(step, "learning", Flops(learning), Tokens(), passes, 0.0))
    yield allocator


def unless_out_of_reach(config: RunConfig) -> Plan | None:
    try:
        return plan(config)
    except UserError as error:
        if "out of reach" not in str(error) and "less than one group" not in str(error):
            raise
        return None


@settings(max_examples=150, deadline=None)
@given(configs())
def test_a_plan_replayed_hits_its_budget_and_rho(config: RunConfig) -> None:
    reachable = unless_out_of_reach(config)
    assume(reachable is not None)
    assert reachable is not None
    before = after = 0
    for allocator in replay(config):
        before, after = after, allocator.spent.total
    assert abs(after - reachable.budget) <= max(after - before, config.budget.tolerance * reachable.budget)
    one_pass = allocator.costs.train / after  # rho cannot be set finer than one completion's pass
    groups = allocator.spent.rows["search"] // config.train.group
    assert allocator.spent.rho == pytest.approx(
        reachable.rho, abs=LANDING + (0.005 if groups >= 10 else one_pass / 2 + 0.005)
    )
