"""``python -m bench checkpoint`` in small: it measures, and its figures are of the right kind."""

import pytest

from bench import bench_checkpoint


@pytest.mark.timeout(120)
async def test_every_figure_is_there() -> None:
    figures = await bench_checkpoint.run(cycles=3, calls=5, records=5)
    for half in ("park", "activate"):
        assert figures[f"{half}_p50_ms"] >= figures[f"{half}_beyond_p50_ms"] > 0
        assert figures[f"{half}_p99_ms"] >= figures[f"{half}_p50_ms"]
        assert figures[f"bare_{half}_p50_ms"] > 0
        assert figures[f"{half}_cpu_ms"] > 0
        assert 0 < figures[f"{half}_journal_share"] < 1
    assert figures["park_records"] >= 6, "arrival, half, three steps at least, end and done are on disk"
    assert figures["helper_round_trip_p99_ms"] >= figures["helper_round_trip_p50_ms"] > 0
    assert figures["journal_record_p50_ms"] > figures["journal_write_only_p50_ms"] > 0
