"""The cost model against published numbers: what is fitted is not counted, and every miss is printed."""

import pytest

from benchmarks.shared.published import SOURCES, drain, fitted


def test_an_engine_drains_as_step_by_step():
    lengths, context = [1, 3, 3, 7], 5
    expected = 0.0
    for step in range(7):
        running = [length for length in lengths if length > step]
        expected += 2 + len(running) + 0.1 * len(running) * (context + step + 0.5)
    assert drain(lengths, context, lambda batch, cached: 2 + batch + 0.1 * cached) == pytest.approx(expected)


@pytest.mark.parametrize("source", SOURCES)
def test_the_first_number_of_a_source_comes_out_of_its_fit(source):
    first = SOURCES[source][1][0]
    assert first.seconds(fitted(first)) == pytest.approx(first.published, rel=1e-3)
