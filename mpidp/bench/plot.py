"""The report as a picture: busbw against size, a line for each section."""

from __future__ import annotations

from pathlib import Path

from mpidp.bench.document import write_whole
from mpidp.bench.driver import Plan, Report
from mpidp.bench.text import size_label


def unavailable(path: Path) -> str | None:
    """Why `path` cannot be drawn to, or None."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return "--plot needs matplotlib: pip install 'mpidp[plot]'"
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        return f"{path}: the name must end in one of {', '.join(sorted(known))}"
    return None


def draw(path: Path, plan: Plan, report: Report, title: str) -> None:
    """Writes the picture to `path`; the format is by its suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    series: dict[str, list[tuple[int, float]]] = {}
    for row in report.rows:
        several = len(plan.dtypes) > 1 or len(plan.ops) > 1
        kind = f" {row.case.dtype} {row.case.op}" if several else ""
        modes = (("out of place", row.out_of_place), ("in place", row.in_place))
        for mode, measurement in modes:
            if measurement is not None:
                bus = row.case.bandwidths(measurement.statistics.p50)[1]
                name = f"{row.variant.label}{kind}, {mode}"
                series.setdefault(name, []).append((row.case.nbytes, bus))
    for case, floor in report.floors.items():
        bus = case.bandwidths(floor.p50)[1]
        series.setdefault("memory floor", []).append((case.nbytes, bus))
    for name, points in series.items():
        style = "k--" if name == "memory floor" else "o-" if name.endswith("in place") else "s:"
        sizes, bandwidths = zip(*sorted(set(points)), strict=True)
        axes.plot(sizes, bandwidths, style, markersize=3, linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: size_label(round(nbytes)))
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    if series:
        axes.legend(fontsize="small")
    write_whole(path, lambda temporary: figure.savefig(temporary))
