"""How a run spends its budget: groups to generate, and completions to train on, from what was spent so far.

rho is not a free knob of GRPO: one pass over everything fixes it near 0.7 for rule rewards. Below that, part of each
group is trained on (kept < G); above, more passes are made (mu > 1). Both are one number, kappa = trained / generated
completions, so the controller works in *row passes*: how many completions to push through a training pass after each
generation. It compares what learning has cost with what the target rho allows for the search and reward compute spent,
and spends the difference; rounding is carried to the next generation, so the achieved rho closes on the target as the
real lengths come in (error feedback: a deterministic dither).

Generations are sized so that an integer number of equal ones lands on the next rung; the size is computed again before
each, from the lengths seen. No state beyond the ledger's sums: replaying the ledger after a restart restores it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from race_sweeps.flops import PolicyFlops
from race_sweeps.ledger import Row, Totals

LANDING = 0.01  # how far rho may move for the last generation before a rung to end on it
MIN_KEPT = 2  # completions trained on per group, at least: one alone carries no comparison


@dataclass(frozen=True)
class Costs:
    """Expected model FLOPs of one completion: generating it, scoring its reward, one training pass over it, its
    old-logprob forward (per kept completion) and its reference forward (per generated completion)."""

    search: int
    reward: int
    train: int
    old: int
    reference: int

    @staticmethod
    def of(policy: PolicyFlops, prompt: int, completion: int, *, reward: int, old: bool, reference: bool) -> Costs:
        return Costs(
            search=policy.search(prompt, completion),
            reward=reward,
            train=policy.train(prompt, completion),
            old=policy.score(prompt, completion) if old else 0,
            reference=policy.score(prompt, completion, adapter=False) if reference else 0,
        )

    def learning(self, kappa: float) -> float:
        """Learning FLOPs per generated completion: kappa = trained / generated. Below 1, one pass over a part."""
        return kappa * self.train + min(kappa, 1.0) * self.old + self.reference

    def rho(self, kappa: float) -> float:
        learning = self.learning(kappa)
        return learning / (self.search + self.reward + learning)

    def kappa(self, rho: float) -> float:
        """The kappa whose learning share is `rho` (not clamped to what is feasible)."""
        learning = rho / (1 - rho) * (self.search + self.reward) - self.reference
        full = self.train + self.old
        return learning / full if learning <= full else (learning - self.old) / self.train


@dataclass
class Allocator:
    """The run-time controller of one run.

    `rho` None trains one pass over everything. `rungs`: model FLOPs, ascending, the last is the budget.
    """

    rho: float | None
    rungs: tuple[int, ...]
    group: int
    max_groups: int
    max_passes: float
    tolerance: float
    costs: Costs
    spent: Totals = field(default_factory=Totals)
    generations: int = 0
    search_cost: float | None = None  # of one completion, recent generations weighing more: lengths drift
    reward_cost: float | None = None  # likewise
    aim: int = 0  # the rung the current generation was sized for

    def record(self, row: Row) -> None:
        """Account a ledger row, live or replayed after a restart."""
        if row.phase == "search":
            self.aim = self.next_rung
            self.generations += 1
            self.search_cost = self._recent(self.search_cost, row)
        elif row.phase == "reward":
            self.reward_cost = self._recent(self.reward_cost, row)
        self.spent.add(row)

    def _recent(self, before: float | None, row: Row) -> float:
        """Mean cost over the row's completions, and over what was known before as if that were four groups."""
        if before is None:
            return row.flops.model / row.rows
        weight = 4 * self.group
        return (before * weight + row.flops.model) / (weight + row.rows)

    @property
    def group_cost(self) -> float:
        """Expected C_total of one group, with the lengths seen so far in place of the planned ones."""
        search = self.costs.search if self.search_cost is None else self.search_cost
        reward = self.costs.reward if self.reward_cost is None else self.reward_cost
        if self.rho is not None:
            return self.group * (search + reward) / (1 - self.rho)
        return self.group * (search + reward + self.costs.learning(1.0) * search / self.costs.search)

    def reached(self, rung: int) -> bool:
        """Whether C_total is as close to `rung` as steps can bring it: no more than the tolerance, or half a group,
        is left."""
        left = rung - self.spent.total
        return left <= max(self.tolerance * rung, self.group_cost / 2)

    @property
    def finished(self) -> bool:
        return self.reached(self.rungs[-1])

    @property
    def next_rung(self) -> int:
        return next((rung for rung in self.rungs if not self.reached(rung)), self.rungs[-1])

    def next_groups(self) -> int:
        """Groups to generate now: the part of what is left to the next rung that makes equal generations."""
        groups_left = max(1.0, (self.next_rung - self.spent.total) / self.group_cost)
        generations = -(-groups_left // self.max_groups)
        return max(1, min(self.max_groups, round(groups_left / generations)))

    def row_passes(self, train: Sequence[int], old: Sequence[int], reference: int) -> int:
        """Completions to push through a training pass, given the exact costs (model FLOPs) of this generation.

        Call after the generation's search and reward rows were recorded. `train`, `old`: per completion; `reference`:
        of the whole generation.
        """
        rows = len(train)
        if self.rho is None:
            return rows
        allowed = self.rho / (1 - self.rho) * (self.spent.model("search") + self.spent.model("reward"))
        left = allowed - self.spent.model("learning") - reference
        left += self._landing(self.spent.total + reference + left)
        once = sum(train) + sum(old)
        passes = left / once if left <= once else (left - sum(old)) / sum(train)
        least = MIN_KEPT * (rows // self.group)
        return max(least, min(round(passes * rows), int(self.max_passes * rows)))

    def _landing(self, total: float) -> float:
        """What to add to learning so that a generation that would end at `total`, as near a rung as groups allow, ends
        on it. rho moves by `LANDING` at most, and the next generations take it back. The larger rho, the coarser its
        groups are in C, and the more C this moves."""
        assert self.rho is not None
        gap, most = self.aim - total, LANDING * self.aim / (1 - self.rho)
        if gap > max(self.tolerance * self.aim, self.group_cost / 2):
            return 0.0  # more generations follow
        return max(-most, min(gap, most))


def select(
    row_passes: int, rewards: Sequence[float], group: int, keep: str, rng: random.Random, generation: int
) -> list[int]:
    """Rows to train on, in training order: full passes over everything, then one over a part of each group.

    `rewards`: one per row, groups of `group` rows in sequence. A partial pass takes as many rows from each group, give
    or take one; which groups give one more rotates with `generation`. `keep`: "random", or "max_variance": the subset
    of the group with the largest reward variance, lowest and highest values together (Xu et al. 2025, "Not All
    Rollouts are Useful", show that it is always k from the top and the rest from the bottom).
    """
    rows = len(rewards)
    groups = rows // group
    order: list[int] = []
    for _ in range(row_passes // rows):
        order += rng.sample(range(rows), rows)
    base, extra = divmod(row_passes % rows, groups)
    partial: list[int] = []
    for g in range(groups):
        count = base + ((g - generation * extra) % groups < extra)
        members = list(range(g * group, (g + 1) * group))
        if keep == "max_variance":
            partial += _max_variance(members, rewards, count, rng)
        else:
            partial += rng.sample(members, count)
    rng.shuffle(partial)
    return order + partial


def _max_variance(members: list[int], rewards: Sequence[float], count: int, rng: random.Random) -> list[int]:
    shuffled = rng.sample(members, len(members))  # ties broken at random, not by position
    ranked = sorted(shuffled, key=lambda i: rewards[i])

    def variance(low: int) -> float:
        chosen = [rewards[i] for i in ranked[:low] + ranked[len(ranked) - (count - low) :]]
        mean = sum(chosen) / count
        return sum((r - mean) ** 2 for r in chosen)

    if count == 0:
        return []
    low = max(range(count + 1), key=variance)
    return ranked[:low] + ranked[len(ranked) - (count - low) :]


def minibatches(order: Sequence[int], minibatch: int) -> list[list[int]]:
    """Cut the training order into optimizer steps of about `minibatch` rows, equal give or take one."""
    steps = max(1, round(len(order) / minibatch))
    return split(order, steps)


def split(order: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` contiguous pieces whose sizes differ by at most one."""
    base, extra = divmod(len(order), parts)
    pieces, start = [], 0
    for part in range(parts):
        end = start + base + (part < extra)
        pieces.append(list(order[start:end]))
        start = end
    return pieces
