"""Step labels of other people's process-supervision data in one form, and how well a scorer reproduces them.

The convention is ProcessBench's (Zheng et al. 2024): steps count from 0, the label of a solution is the position of its
first wrong step, -1 when every step is right. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence


def auc(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Area under the ROC curve: the chance that a right step scores above a wrong one, ties counting half. Raises
    `ValueError` when only one kind is there."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    positives = sum(right)
    negatives = len(right) - positives
    if not positives or not negatives or len(scores) != len(right):
        raise ValueError(f"AUC of {positives} right and {negatives} wrong steps, {len(scores)} scores")
    below, twice = 0, 0  # wrong steps seen so far; pairs won, doubled so that ties stay integers
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        tied = sum(right[i] for i in order[start:end])
        twice += tied * (2 * below + (end - start - tied))
        below += end - start - tied
        start = end
    return twice / (2 * positives * negatives)
