"""Tables of `baton bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from baton.cli.show import show_table
from baton.core.units import format_bytes

if TYPE_CHECKING:
    from baton.bench.serve.benchmark import MeasuredRun
    from baton.bench.serve.figures import ServeFigures


def show_runs(measured: Sequence[MeasuredRun]) -> None:
    if len(measured) == 1:
        _show_one(measured[0])
    elif measured:
        show_table("rates", [name_of_run(one) | _rates_of(one.figures) for one in measured])
        rows = [name_of_run(one) | row for one in measured for row in _latencies(one.figures)]
        show_table("latencies, ms", rows)
        show_table("service", [name_of_run(one) | _service(one.figures) for one in measured])
    _show_errors(measured)


def _show_one(one: MeasuredRun) -> None:
    """Show one run in tables narrow enough for any terminal."""
    figures = _rates_of(one.figures) | _service(one.figures)
    rows = [{"what": name, "figure": cell} for name, cell in figures.items()]
    show_table(f"{one.name}, {one.rate:g} requests/s", rows)
    show_table("latencies, ms", list(_latencies(one.figures)))


def name_of_run(one: MeasuredRun) -> dict[str, object]:
    return {"cluster": one.name, "rate": one.rate}


def _rates_of(figures: ServeFigures) -> dict[str, object]:
    return {
        "answered": f"{figures.num_answered}/{figures.num_planned}",
        "failed": figures.num_failed,
        "requests/s": figures.requests_per_s,
        "tokens in/s": figures.input_tokens_per_s,
        "tokens out/s": figures.output_tokens_per_s,
        "good/s": figures.goodput_per_s,
        "good %": figures.good_share * 100,
    }


def _latencies(figures: ServeFigures) -> Iterator[dict[str, object]]:
    for name, quantiles in (
        ("first token", figures.ttft_ms),
        ("gap", figures.itl_ms),
        ("per token", figures.tpot_ms),
        ("whole answer", figures.e2e_ms),
    ):
        if quantiles is not None:
            yield {"time": name} | asdict(quantiles)


def _service(figures: ServeFigures) -> dict[str, object]:
    return {
        "remote": figures.num_remote,
        "local": figures.num_local,
        "retried": figures.num_retried,
        "KV moved": format_bytes(figures.kv_bytes),
        "prefix tokens hit": figures.prefix_hit_tokens,
        "late sends": figures.num_late,
        "client lag p99 ms": figures.client_lag_p99_ms,
        "client CPU %": figures.client_cpu_share * 100,
    }


def _show_errors(measured: Sequence[MeasuredRun]) -> None:
    rows = [
        name_of_run(one) | {"reason": reason, "requests": count}
        for one in measured
        for reason, count in one.figures.errors.items()
    ]
    if rows:
        show_table("failures", rows)
