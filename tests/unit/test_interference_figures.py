"""What is told of streams that long prompts came in the way of, on arrivals made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.interference import Figures, Interference, Row, figures, run
from baton.bench.interference_plot import draw
from baton.bench.streams import EngineFailed, Streamed
from engine.errors import InvalidConfig


def stream(*arrivals_s: float, tokens: int = 1) -> Streamed:
    return Streamed(0.0, [(arrival_s, tokens) for arrival_s in arrivals_s])


def test_gaps_count_only_between_the_two_times() -> None:
    steady = stream(0.0, 5.0, 10.0, 10.1, 10.2, 10.5, 20.0)

    found = figures([steady], [Streamed(10.0, [(10.4, 1)])], began_s=10.0, ended_s=11.0)

    assert found.itl_most_ms == pytest.approx(300)
    assert found.itl_p50_ms == pytest.approx(100)
    assert found.first_token_p50_s == pytest.approx(0.4)
    assert found.tokens_per_s == pytest.approx(4)


def test_messages_of_several_tokens_count_as_one_gap_and_all_their_tokens() -> None:
    found = figures([stream(1.0, 1.2, 1.4, tokens=3)], [stream(1.1)], began_s=1.0, ended_s=2.0)

    assert found.itl_p50_ms == pytest.approx(200)
    assert found.tokens_per_s == pytest.approx(7)


def test_streams_that_stood_still_are_an_error() -> None:
    with pytest.raises(EngineFailed):
        figures([stream(0.5)], [stream(1.1)], began_s=1.0, ended_s=2.0)


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidConfig):
        Interference(num_prompts=0)


def test_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    itl_by_engine = {"own": [10.0, 20.0, 40.0], "other": [20.0, 60.0, 40.0]}
    started: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> str:
            started.append(self.name)
            return self.name

        def __exit__(self, *_: object) -> None: ...

    def made_up(_: Interference, name: object) -> Figures:
        itl_ms = itl_by_engine[str(name)].pop(0)
        return Figures(itl_ms, itl_ms, itl_ms, 1.0, 1.0, 1.0)

    monkeypatch.setattr("baton.bench.interference.measured", made_up)
    engines = {name: (lambda name=name: Named(name)) for name in itl_by_engine}

    own, other = run(Interference(), engines, lambda *_: None)  # type: ignore[arg-type]

    assert started == ["own", "other"] * 3
    assert own.itl_p50_ratio == 1.0
    assert other.itl_p50_ratio == 2.0
    assert (own.figures.itl_p50_ms, other.figures.itl_p50_ms) == (20.0, 40.0)


def test_the_picture_names_each_engine(tmp_path: Path) -> None:
    found = Figures(50.0, 1500.0, 1600.0, 1.5, 1.6, 40.0)
    rows = [Row(f"engine {number}", found, 1.0, 1.0, 1.0) for number in range(3)]

    draw(Interference(), rows, tmp_path / "one.svg")

    written = (tmp_path / "one.svg").read_text(encoding="utf-8")
    for row in rows:
        assert f"<!-- {row.engine} -->" in written
    assert "<!-- 1500 -->" in written
