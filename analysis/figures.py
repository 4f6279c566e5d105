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
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.compare import Rung
from analysis.units import fixed, flops_text

if TYPE_CHECKING:
    import pandas as pd

DPI = 200
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
    """A name from a file, short enough to leave room for the figure."""
    return text if len(text) <= 28 else f"{text[:14]}…{text[-13:]}"


def _legend(figure: Figure, look: dict[str, tuple[str, str]], columns: int) -> None:
    handles = [Line2D([], [], color=colour, marker=marker) for colour, marker in look.values()]
    # A legend leaves out labels that begin with an underscore.
    names = [f"\u200b{name}" if name.startswith("_") else name for name in map(_label, look)]
    figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)))


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
        for cell in (c for c in cells if c.n > 1):
            axes.plot(
                cell.rhos, cell.values, "o", markersize=3.6, markerfacecolor="white", markeredgecolor=colour,
                markeredgewidth=0.9, linestyle="none", zorder=5,
            )  # fmt: skip
        axes.errorbar(
            [c.rho for c in cells], [c.mean for c in cells], yerr=rung.sd, color=colour, marker=marker, markersize=5.5,
            capsize=3, elinewidth=1.1, label=model,
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

    Small white points are seeds, lines join means, bars are plus and minus one pooled standard deviation of one run,
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
        _legend(figure, look, 3 if only is not None else 6)
    return figure


def compute_split(results: pd.DataFrame, models: Sequence[str], simulated: bool = False) -> Figure:
    """Shares of C_total that went to learning, search and reward: one bar per model and allocation, means of seeds.

    Learning stands first, so its bar ends at the achieved rho; a tick marks the planned rho.
    """
    columns = [*(f"c_{part}" for part in COMPONENT_COLOURS), "c_total", "rho_planned"]
    means = results.groupby(["model", "allocation"], sort=False)[columns].mean().reset_index()
    means = means.sort_values("rho_planned", kind="stable")
    with _style():
        figure = _figure(5.6, 1.6 + 0.26 * len(means) + 0.24 * len(models))
        axes = figure.subplots()
        bars: list[tuple[float, str, str]] = []  # (height, name, numbers)
        y = 0.0
        for model in models:
            rows = means[means["model"] == model].to_dict("records")
            if rows:
                axes.text(0, y, _label(model), fontweight="bold", va="center", ha="left")
                y += 0.85
            for row in rows:
                _split_bar(axes, y, {str(k): v for k, v in row.items()}, first=not bars)
                numbers = f"{fixed(row['c_learning'] / row['c_total'])} · {flops_text(row['c_total'])}"
                bars.append((y, _label(str(row["allocation"])), numbers))
                y += 1
            y += 0.3 if rows else 0.0
        heights = [height for height, _, _ in bars]
        axes.set_yticks(heights, [name for _, name, _ in bars])
        axes.set_ylim(y - 0.3, -0.6)
        axes.set_xlim(0, 1)
        axes.grid(axis="y", visible=False)
        right = axes.secondary_yaxis("right")
        right.set_yticks(heights, [numbers for _, _, numbers in bars])
        right.tick_params(length=0, labelsize=8.5)
        right.spines["right"].set_visible(False)
        axes.set_xlabel("share of C_total (model FLOPs), at the end of each run")
        axes.set_title(_title("Where the compute went", simulated), loc="left")
        axes.set_title("rho · C_total", loc="right", fontsize=8.5)
        figure.legend(loc="outside lower center", ncols=4, columnspacing=1.2, handlelength=1.6)
    return figure


def _split_bar(axes: Any, y: float, row: dict[str, Any], first: bool) -> None:
    left = 0.0
    for part, colour in COMPONENT_COLOURS.items():
        share = float(row[f"c_{part}"]) / float(row["c_total"])
        axes.barh(
            y, share, left=left, height=0.72, color=colour, hatch=COMPONENT_HATCH[part], edgecolor="none",
            label=part if first else None,
        )  # fmt: skip
        left += share
    planned = float(row["rho_planned"])
    axes.plot(
        [planned, planned], [y - 0.46, y + 0.46], color=INK, linewidth=2.2, solid_capstyle="butt",
        label="planned rho" if first else None,
    )  # fmt: skip


def compute_performance(rungs: Sequence[Rung], value: str = "pass@1", simulated: bool = False) -> Figure:
    """Value against C_total over the rungs, each model at its best allocation of that rung (named beside the point)."""
    models = models_of(rungs)
    look = looks(models)
    with _style():
        figure = _figure(5.6, 4.4)
        axes = figure.subplots()
        for model in models:
            colour, marker = look[model]
            points = [(r.best[model].c_total, r.best[model].mean, r.sd or 0.0) for r in rungs if model in r.best]
            start = next((r.starts[model] for r in rungs if math.isfinite(r.starts.get(model, math.nan))), math.nan)
            if math.isfinite(start):
                axes.axhline(start, color=colour, linestyle=":", linewidth=1.1)
            axes.errorbar(
                [p[0] for p in points], [p[1] for p in points], yerr=[p[2] for p in points],
                color=colour, marker=marker, markersize=6, capsize=3, elinewidth=1.1, label=model,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([rung.budget for rung in rungs]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: flops_text(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.2)
        low, high = _levels(rungs)
        axes.set_ylim(low, high + 0.05 * (high - low))
        for number, rung in enumerate(rungs):
            _name_best(axes, rung, first=number == 0)
        axes.set_xlabel("C_total (model FLOPs, achieved)")
        axes.set_ylabel(value)
        axes.set_title(_title("Each model at its best allocation", simulated))
        _legend(figure, look, 4)
    return figure


def _name_best(axes: Any, rung: Rung, first: bool) -> None:
    """Write the allocation's name at each model's best: above it, or below or beside it where another is close."""
    low, high = axes.get_ylim()
    close = 0.09 * (high - low)
    best = sorted(rung.best.values(), key=lambda cell: cell.mean, reverse=True)
    for i, cell in enumerate(best):
        offset, place = ((-9, -3), "right") if first else ((9, -3), "left")
        if i == 0 or best[i - 1].mean - cell.mean > close:
            offset, place = (0, 9), "center"
        elif i == len(best) - 1 or cell.mean - best[i + 1].mean > 2.2 * close:
            offset, place = (0, -15), "center"
        axes.annotate(
            cell.allocation,
            (cell.c_total, cell.mean),
            xytext=offset,
            textcoords="offset points",
            fontsize=7.5,
            ha=place,
        )


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
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
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
    style = f"width:100%;max-width:{float(width[1]) * 4 / 3:.0f}px"
    return f'<svg {view[0]} role="img" aria-label="{label}" style="{style}">{body}'
