"""benchmarks/studies/stream_quality.py: rows by position."""

from __future__ import annotations

import stream_quality
import stream_segments
from helpers.batch_jobs import write_lines
from helpers.read_back import read_csv


def test_a_run_has_a_row_for_each_piece(words_model, tmp_path, capsys):
    text = " ".join(f"w{number * 7 % 100 + 3}" for number in range(100))
    articles = write_lines(tmp_path / "in.jsonl", [{"article": text}] * 3)
    out = tmp_path / "out.csv"
    assert stream_quality.main([
        "--input-path", articles, "--tokens", "280", "--piece", "40", "--num-window-length", "16",
        "--policies", "h2o", "window", "full", "--csv", str(out), "--model", words_model,
        "--device", "cpu"]) == 0
    rows = read_csv(out)
    assert tuple(rows[0]) == stream_segments.COLUMNS
    pieces = stream_segments.by_policy(rows)
    assert [*pieces] == ["h2o", "window", "full"] and len(pieces["h2o"]) == 7
    assert {row["cached_tokens"] for row in pieces["h2o"]} == {"16"}
    assert pieces["full"][-1]["cached_tokens"] == "279"
    text = capsys.readouterr()
    assert text.err == ""
    assert stream_quality.main(["--from-csv", str(out)]) == 0
    assert capsys.readouterr().out == text.out
