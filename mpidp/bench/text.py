"""The report as text: nccl-tests' columns, and everything of ours in lines that begin with #."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpidp.bench.driver import (
    Measurement,
    Plan,
    Report,
    Row,
    Variant,
    average_bus_bandwidth,
    out_of_bounds,
)


def number(value: float, width: int) -> str:
    """`value` with two decimals, or as many as `width` characters leave room for."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text.rjust(width)
    return f"{value:.1e}".rjust(width)


def size_label(nbytes: int) -> str:
    """8, 2K, 1.5M: binary, as the options take them."""
    for shift, suffix in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g}{suffix}"
    return str(nbytes)


def header(plan: Plan, facts: Mapping[str, Any]) -> Iterator[str]:
    """What was run, where: the lines before the first table."""
    if plan.collective == "barrier":
        sweep = "no data"
    else:
        step = f"{plan.step}(bytes)" if plan.step is not None else f"{plan.factor}(factor)"
        sweep = f"minBytes {plan.min_bytes} maxBytes {plan.max_bytes} step: {step}"
    warmup = "auto" if plan.warmup is None else plan.warmup
    iterations = "auto" if plan.iterations is None else plan.iterations
    yield f"# mpidp version {facts['version']}: {plan.collective}"
    yield f"# MPI library: {facts['mpi_library']}"
    yield (
        f"# {sweep} warmup iters: {warmup} iters: {iterations} validation: {int(plan.check)} "
        f"cadence: {plan.cadence}"
    )
    yield f"# Ranks: {facts['world_size']} on {layout(facts['local_sizes'])}"
    if facts["oversubscribed"]:
        yield f"# Oversubscribed: more ranks than cores ({facts['cores']}) on a node"
    for dtype, op in plan.undefined():
        yield f"# Left out: {op} of {dtype}, which is not defined"
    yield f"# Instruction set: {facts['instruction_set']}"
    if facts.get("device_transport"):
        yield f"# GPU: {facts['devices'][0]['device_info']}, transport {facts['device_transport']}"
    yield "# Times: slowest rank, median over iterations. 1 GB = 1e9 bytes"


def layout(local_sizes: Sequence[int]) -> str:
    """How many nodes, and how many ranks on each."""
    nodes = f"{len(local_sizes)} node{'s' if len(local_sizes) > 1 else ''}"
    if len(set(local_sizes)) == 1:
        return f"{nodes}, {local_sizes[0]} per node"
    return f"{nodes}, {min(local_sizes)} to {max(local_sizes)} per node"


def section_header(variant: Variant, algorithm: str) -> Iterator[str]:
    """The lines above one section's rows."""
    yield "#"
    yield f"# Backend: {variant.backend.name}  memory: {variant.memory}  algorithm: {algorithm}"
    yield "#"
    blank = f"{'':>10}  {'':>12}  {'':>10}  {'':>6}  {'':>6}"
    yield f"# {blank}  {'out-of-place':^32}  {'in-place':^32}".rstrip()
    names = f"{'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    heads = f"# {'size':>10}  {'count':>12}  {'type':>10}  {'redop':>6}  {'root':>6}"
    yield f"{heads}  {names}  {names}"
    units = f"{'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
    row = f"# {'(B)':>10}  {'(elements)':>12}  {'':>10}  {'':>6}  {'':>6}  {units}  {units}"
    yield row.rstrip()


def row_line(row: Row) -> str:
    """One line of the table; a mode that was not measured shows dashes."""
    case = row.case
    cells = [_cell(row, row.out_of_place), _cell(row, row.in_place)]
    return (
        f"{case.nbytes:>12}  {case.count:>12}  {case.dtype:>10}  {case.op:>6}  {case.root:>6}  "
        + "  ".join(cells)
    )


def _cell(row: Row, measurement: Measurement | None) -> str:
    if measurement is None:
        return f"{'-':>7}  {'-':>6}  {'-':>6}  {'-':>6}"
    seconds = measurement.statistics.p50
    algorithm, bus = row.case.bandwidths(seconds)
    wrong = "N/A" if measurement.wrong is None else str(measurement.wrong)
    return f"{number(seconds * 1e6, 7)}  {number(algorithm, 6)}  {number(bus, 6)}  {wrong:>6}"


def section_footer(rows: Sequence[Row]) -> Iterator[str]:
    """The lines below one section's rows."""
    for note in dict.fromkeys(row.note for row in rows if row.note):
        yield f"# Not measured (-): {note}"
    wrong = out_of_bounds(rows)
    yield f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':<20} : {average_bus_bandwidth(rows):g}"


def floor_table(report: Report, variants: Sequence[Variant]) -> Iterator[str]:
    """The memory floor, and how near to it each variant of this library comes."""
    ours = [variant for variant in variants if variant.backend.name == "mpidp"]
    if not report.floors or not ours:
        return
    yield "#"
    yield "# Memory floor: every rank at once updates as many bytes in place (one load, one store)"
    yield "# Efficiency: floor time / time, out of place and in place"
    heads = "".join(f"  {variant.label:>18}" for variant in ours)
    yield f"# {'size':>10}  {'type':>10}  {'redop':>6}  {'floor(us)':>9}{heads}"
    for case, floor in report.floors.items():
        cells = ""
        for variant in ours:
            row = _row_of(report, variant, case)
            pair = " ".join(
                "      -" if m is None else f"{floor.p50 / m.statistics.p50:>7.1%}"
                for m in (row.out_of_place, row.in_place)
            )
            cells += f"  {pair:>18}"
        line = f"# {case.nbytes:>10}  {case.dtype:>10}  {case.op:>6}  {number(floor.p50 * 1e6, 9)}"
        yield line + cells


def ratio_tables(report: Report, variants: Sequence[Variant]) -> Iterator[str]:
    """How many times faster this library is than each other backend, size by size."""
    ours = [variant for variant in variants if variant.backend.name == "mpidp"]
    for other in variants:
        if other.backend.name == "mpidp" or not ours:
            continue
        yield "#"
        yield f"# Ratio: busbw of mpidp / busbw of {other.label}, out of place and in place"
        heads = "".join(f"  {variant.label:>18}" for variant in ours)
        yield f"# {'size':>10}  {'type':>10}  {'redop':>6}{heads}"
        for row in report.section(other):
            cells = ""
            for variant in ours:
                pair = ratios(_row_of(report, variant, row.case), row)
                text = " ".join("      -" if r is None else f"{number(r, 6)}x" for r in pair)
                cells += f"  {text:>18}"
            yield f"# {row.case.nbytes:>10}  {row.case.dtype:>10}  {row.case.op:>6}{cells}"


def ratios(ours: Row, other: Row) -> tuple[float | None, float | None]:
    """(out of place, in place) time of `other` over ours; None where either was not measured."""

    def ratio(mine: Measurement | None, theirs: Measurement | None) -> float | None:
        if mine is None or theirs is None or mine.statistics.p50 == 0:
            return None
        return theirs.statistics.p50 / mine.statistics.p50

    return ratio(ours.out_of_place, other.out_of_place), ratio(ours.in_place, other.in_place)


def _row_of(report: Report, variant: Variant, case: Any) -> Row:
    return next(row for row in report.section(variant) if row.case == case)
