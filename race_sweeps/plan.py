"""Plan of one grid point: what the budget buys at the target update fraction, before anything runs. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from race_sweeps import memory
from race_sweeps.allocate import MIN_KEPT, Costs
from race_sweeps.config import DEVICES, RunConfig
from race_sweeps.errors import UserError
from race_sweeps.flops import PolicyFlops, RewardFlops
from race_sweeps.models import policy_flops, reward_shape, scorers
from race_sweeps.rollouts import expected_cached


@dataclass(frozen=True)
class Plan:
    """Planned quantities of one run. FLOPs are integers in the model convention; `gpu_hours` None without a device;
    `memory` in bytes; `simulated`: nothing will be trained."""

    budget: int
    rungs: tuple[int, ...]
    rho: float
    kappa: float
    kept: float
    mu: float
    reachable_rho: tuple[float, float]
    flops: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    generations: int
    completions: int
    optimizer_steps: int
    generated_tokens: int
    trained_tokens: int
    gpu_hours: float | None
    memory: dict[str, int]
    simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, **asdict(self)}


def costs(config: RunConfig, policy: PolicyFlops) -> Costs:
    """Expected cost of one completion under this configuration; of a group's prompt in a prefix cache, the mean."""
    prompt, completion = config.rollout.expected_prompt, config.rollout.expected_completion
    cost = Costs.of(
        policy,
        prompt,
        completion,
        reward=_reward_cost(config, prompt, completion),
        old=config.train.old_logprobs == "trainer",
        reference=config.train.beta > 0,
    )
    group, shared = config.train.group, policy.search(prompt, completion, expected_cached(config))
    return replace(cost, search=(cost.search + (group - 1) * shared) // group)


def _reward_cost(config: RunConfig, prompt: int, completion: int) -> int:
    """Expected model FLOPs of scoring one completion; 0 for rules."""
    model, scorer = reward_shape(config), config.reward.scorer
    if model is None:
        return 0
    if config.reward.kind == "prm_proxy":  # a forward after each step; a group shares the one before the first
        ends = [completion * step // scorer.steps for step in range(scorer.steps + 1)]
        asked = max(1, scorer.template_tokens)  # the cue and the answer
        before, *after = (RewardFlops(model).score(prompt + end + asked, asked) for end in ends)
        return before // config.train.group + sum(after)
    return RewardFlops(model).score(prompt + completion + scorer.template_tokens + scorer.steps, scorer.steps)


def rungs(config: RunConfig) -> tuple[int, ...]:
    """Model FLOPs of each rung; the last one is the budget."""
    budget = config.budget.flops * config.update_fraction.budget_factor
    return tuple(round(share * budget) for share in config.budget.rungs)


class OutOfReach(UserError):
    """No kept and mu give the target update fraction."""


def plan(config: RunConfig) -> Plan:
    """Solve (C, rho) for kept, mu and the number of steps; prefers the smaller mu. Raises `OutOfReach`, and `UserError`
    when the budget is less than a group or the point does not fit the device."""
    policy = policy_flops(config)
    cost = costs(config, policy)
    group, train = config.train.group, config.train
    least, most = MIN_KEPT / group, config.update_fraction.max_passes
    reachable = (cost.rho(least), cost.rho(most))
    target = config.update_fraction.rho
    kappa = 1.0 if target is None else cost.kappa(target)
    if target is not None and not least <= kappa <= most:
        nearest = min(reachable, key=lambda r: abs(r - target))
        raise OutOfReach(
            f"update_fraction.rho={target:g}: out of reach for model {config.model.name} with reward "
            f"{config.reward.name}: reachable is {_up(reachable[0]):.3f} to {_down(reachable[1]):.3f} "
            f"(kept {MIN_KEPT} of {group} with one pass, to all {group} with {most:g} passes); nearest: "
            f"update_fraction.rho={_inside(nearest, reachable):.3f}"
            + (
                f", or a larger train.group than {group}"
                if kappa < least
                else ", or a larger update_fraction.max_passes"
            )
        )
    budget = rungs(config)[-1]
    per_completion = cost.search + cost.reward + cost.learning(kappa)
    groups = budget / (per_completion * group)
    if groups < 1:
        raise UserError(
            f"budget.flops={config.budget.flops:g}: less than one group of {group} completions "
            f"({per_completion * group:.3g} FLOPs) for model {config.model.name}; raise the budget"
        )
    completions = round(groups) * group
    generations = math.ceil(round(groups) / train.prompts)
    trained = completions * kappa
    tokens = config.rollout.expected_prompt + config.rollout.expected_completion
    flops = {
        "search": completions * cost.search,
        "learning": round(completions * cost.learning(kappa)),
        "reward": completions * cost.reward,
    }
    total = sum(flops.values())
    device = config.plan.device
    needed = memory.estimate(config, policy, scorers(config))
    memory.refuse_if_too_large(config, needed)
    return Plan(
        budget=budget,
        rungs=rungs(config),
        rho=cost.rho(kappa),
        kappa=kappa,
        kept=min(kappa, 1.0) * group,
        mu=max(kappa, 1.0),
        reachable_rho=reachable,
        flops={**flops, "total": total},
        prompt_tokens=config.rollout.expected_prompt,
        completion_tokens=config.rollout.expected_completion,
        generations=generations,
        completions=completions,
        optimizer_steps=max(generations, round(trained / train.minibatch)),
        generated_tokens=completions * config.rollout.expected_completion,
        trained_tokens=round(trained * tokens),
        gpu_hours=total / (DEVICES[device].flops * config.plan.utilisation) / 3600 if device else None,
        memory={**asdict(needed), "total": needed.total},
        simulated=config.trainer.kind == "simulated",
    )


def _up(value: float) -> float:
    return math.ceil(value * 1000) / 1000


def _down(value: float) -> float:
    return math.floor(value * 1000) / 1000


def _inside(value: float, interval: tuple[float, float]) -> float:
    """`value`, an end of `interval`, rounded to three digits towards its inside."""
    return _up(value) if value == interval[0] else _down(value)
