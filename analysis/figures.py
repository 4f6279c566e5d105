"""The report's figures, as matplotlib figures without a display; PNG files and inline SVG are made from them."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.compare import Rung
from analysis.units import fixed, flops_text

if TYPE_CHECKING:
    import pandas as pd

DPI = 160
# Okabe & Ito (2008), "Color Universal Design": distinguishable with every common colour vision; yellow and black left
# out, as one of them vanishes on a light or on a dark page.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
COMPONENT_COLOURS = {"learning": "#0072B2", "search": "#E69F00", "reward": "#CC79A7"}
COMPONENT_HATCH = {"learning": "", "search": "////", "reward": "...."}
# Text, axes and grid are drawn in this one colour, which inline SVG turns into the page's own text colour.
INK = "#23201f"
_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names from files may hold dollar signs
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.titlecolor": INK, "hatch.color": INK, "hatch.linewidth": 0.4,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.12, "axes.axisbelow": True,
    "font.size": 9.5, "legend.frameon": False, "legend.fontsize": 9, "svg.fonttype": "none", "lines.linewidth": 1.8,
}  # fmt: skip


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE):
        yield


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _label(text: str) -> str:
    # A legend leaves out labels that begin with an underscore.
    return f"\u200b{text}" if text.startswith("_") else text


def _title(text: str, simulated: bool) -> str:
    return f"SIMULATED · {text}" if simulated else text


def looks(models: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each model, the same in every figure."""
    pairs = zip(itertools.cycle(PALETTE), itertools.cycle(MARKERS), strict=False)
    return dict(zip(models, pairs, strict=False))


def models_of(rungs: Sequence[Rung]) -> list[str]:
    """Every model that appears, in order."""
    return list(dict.fromkeys(cell.model for rung in rungs for cell in rung.cells))


def _levels(rungs: Sequence[Rung]) -> tuple[float, float]:
    """Common limits of the value axis."""
    values = [v for rung in rungs for cell in rung.cells for v in cell.values]
    values += [v for rung in rungs for v in rung.starts.values() if math.isfinite(v)]
    spread = max((rung.sd or 0.0) for rung in rungs)
    low, high = min(values) - spread, max(values) + spread
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def _isoflop_panel(axes: Any, rung: Rung, look: dict[str, tuple[str, str]], value: str) -> None:
    for model in dict.fromkeys(cell.model for cell in rung.cells):
        colour, marker = look[model]
        cells = sorted((c for c in rung.cells if c.model == model), key=lambda c: c.rho)
        if math.isfinite(rung.starts[model]):
            axes.axhline(rung.starts[model], color=colour, linestyle=":", linewidth=1.1, alpha=0.9)
        for cell in cells:
            axes.plot(cell.rhos, cell.values, marker, color=colour, markersize=3.5, alpha=0.45, linestyle="none")
        axes.errorbar(
            [c.rho for c in cells], [c.mean for c in cells], yerr=rung.sd, color=colour, marker=marker, markersize=6,
            capsize=3, elinewidth=1.1, label=_label(model),
        )  # fmt: skip
        best = rung.best[model]
        axes.plot(
            [best.rho], [best.mean], marker="o", markersize=13, markerfacecolor="none", markeredgecolor=colour,
            markeredgewidth=1.2, linestyle="none",
        )  # fmt: skip
    axes.set_xlabel("achieved rho (learning share of C_total)")
    axes.set_ylabel(value)


def isoflop(rungs: Sequence[Rung], value: str = "pass@1", simulated: bool = False, only: int | None = None) -> Figure:
    """Value against achieved update fraction: one panel per rung, one line per model.

    Small points are seeds, lines join means, bars are plus and minus one pooled standard deviation of a single run,
    dotted lines the level before training, rings the best allocation of each model. `only`: draw that panel alone,
    with the axes it has among the others.
    """
    look, limits = looks(models_of(rungs)), _levels(rungs)
    shown = list(rungs) if only is None else [rungs[only]]
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    with _style():
        figure = _figure(4.1 * columns + 0.3, 3.7 * lines + (0.5 if only is None else 0.4))
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, rung in itertools.zip_longest(grid.flat, shown):
            if rung is None:
                axes.set_visible(False)
                continue
            _isoflop_panel(axes, rung, look, value)
            axes.set_ylim(*limits)
            title = f"C_total = {flops_text(rung.budget)}"
            axes.set_title(_title(title, simulated) if only is not None else title)
        if only is None:
            figure.suptitle(_title(f"IsoFLOP curves: {value} against update fraction", simulated), fontweight="bold")
        # Every model's handle, also of models that some panel lacks.
        handles = {}
        for axes in grid.flat:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        columns = min(len(handles), 3 if only is not None else 6)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)
    return figure


def compute_split(results: pd.DataFrame, models: Sequence[str], simulated: bool = False) -> Figure:
    """Shares of C_total that went to learning, search and reward: one bar per model and allocation, means of seeds.

    Learning stands first, so its bar ends at the achieved rho; a black tick marks the planned rho.
    """
    columns = ["c_learning", "c_search", "c_reward", "c_total", "rho_planned"]
    means = results.groupby(["model", "allocation"], sort=False)[columns].mean().reset_index()
    means = means.sort_values("rho_planned", kind="stable")
    with _style():
        count = len(means)
        figure = _figure(8.2, 1.5 + 0.27 * count + 0.2 * len(models))
        axes = figure.subplots()
        ticks: list[float] = []
        names: list[str] = []
        y = 0.0
        for model in models:
            rows = means[means["model"] == model].to_dict("records")
            if not rows:
                continue
            axes.text(0, y, model, fontweight="bold", va="center", ha="left", clip_on=False)
            y += 0.85
            for row in rows:
                left = 0.0
                for part, colour in COMPONENT_COLOURS.items():
                    share = float(row[f"c_{part}"]) / float(row["c_total"])
                    axes.barh(
                        y, share, left=left, height=0.72, color=colour, hatch=COMPONENT_HATCH[part], edgecolor="none",
                        label=part if not ticks else None,
                    )  # fmt: skip
                    left += share
                planned = float(row["rho_planned"])
                axes.plot([planned, planned], [y - 0.46, y + 0.46], color=INK, linewidth=2.2, solid_capstyle="butt",
                          label="planned rho" if not ticks else None)  # fmt: skip
                rho = float(row["c_learning"]) / float(row["c_total"])
                axes.text(1.01, y, f"{fixed(rho)}   {flops_text(float(row['c_total']))}", va="center", fontsize=8.5)
                ticks.append(y)
                names.append(str(row["allocation"]))
                y += 1
            y += 0.35
        axes.text(1.01, -0.15, "rho    C_total", va="center", fontsize=8.5, fontweight="bold")
        axes.set_yticks(ticks, names)
        axes.set_ylim(y - 0.3, -0.6)
        axes.set_xlim(0, 1)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("share of C_total (model FLOPs), at the end of each run")
        axes.set_title(_title("Where the compute went", simulated), loc="left")
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def compute_performance(rungs: Sequence[Rung], value: str = "pass@1", simulated: bool = False) -> Figure:
    """Value against C_total over the rungs, each model at its best allocation of that rung (named beside the point)."""
    models = models_of(rungs)
    look = looks(models)
    with _style():
        figure = _figure(7.6, 4.4)
        axes = figure.subplots()
        for model in models:
            colour, marker = look[model]
            points = [(r.best[model].c_total, r.best[model].mean, r) for r in rungs if model in r.best]
            start = next((r.starts[model] for r in rungs if math.isfinite(r.starts.get(model, math.nan))), math.nan)
            if math.isfinite(start):
                axes.axhline(start, color=colour, linestyle=":", linewidth=1.1)
            axes.errorbar(
                [x for x, _, _ in points], [y for _, y, _ in points], yerr=[r.sd or 0.0 for _, _, r in points],
                color=colour, marker=marker, markersize=6, capsize=3, elinewidth=1.1, label=_label(model),
            )  # fmt: skip
            for x, y, rung in points:
                axes.annotate(
                    rung.best[model].allocation, (x, y), xytext=(0, 9), textcoords="offset points", fontsize=7.5,
                    ha="center", color=colour,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: flops_text(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("C_total (model FLOPs, achieved)")
        axes.set_ylabel(value)
        axes.set_title(_title("Compute and performance at each model's best allocation", simulated))
        figure.legend(loc="outside lower center", ncols=min(6, len(models)))
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an `<svg>` element to stand inside a page: transparent, in the page's text colour, scaling with it.

    `prefix` makes its ids unique within the page; `label` is what a screen reader says.
    """
    buffer = io.StringIO()
    with _style(), matplotlib.rc_context({"svg.hashsalt": prefix}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )  # fmt: skip
    text = buffer.getvalue()
    head, body = text[text.index("<svg") :].split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    width = re.search(r'width="([0-9.]+)pt"', head)
    assert view is not None
    assert width is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", body).replace("xlink:href", "href")
    body = body.replace(INK, "currentColor")
    label = html.escape(label, quote=True)
    return (
        f'<svg {view[0]} role="img" aria-label="{label}" style="width:100%;max-width:{float(width[1]) * 4 / 3:.0f}px">{body}'
    )
