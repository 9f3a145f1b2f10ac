import gzip
import itertools
import json
from pathlib import Path

import pytest

from kybernate.lab.simulate.generate import service_seconds
from kybernate.lab.traces import Arrival, TraceError, load
from services.router.request_log import ACCESS_FIELDS

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
MOONCAKE_CSV = (
    "timestamp_ms,input_length,output_length,n_prefix_blocks,first_block\n0,6758,500,14,1\n3040,7322,490,15,14\n"
)
MOONCAKE_JSONL = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3040, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
)
MANY = "arrival_s,model,prompt_tokens,output_tokens\n1.143,large,3042,99\n1.726,small,723,40\n"
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
)
BURST_NEW = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,s1,3.2,ChatGPT,472,18,490,Conversation log\n"
)
GENTD26 = (
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,negative_prompt_length,"
    "num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora\n"
    "2030-01-01 10:00:00,TXT_2_IMG,SUCCEED,32.0,G0,63.0,26.0,1.0,30.0,M0,0\n"
    "2030-01-01 10:00:05,TXT_2_IMG,PROCESSING,,G0,63.0,,1.0,30.0,M0,0\n"
    "2030-01-01 10:00:07,IMG_2_IMG,SUCCEED,9.5,G1,,,1.0,30.0,M1,0\n"
)
ACCESS_LOG = (
    '{"time": "2030-01-01T10:00:00.500Z", "model": "a", "prompt_tokens": 7, "output_tokens": 9, "status": 200}\n'
    '{"time": "2030-01-01T10:00:02.500Z", "model": "b", "prompt_tokens": 8, "output_tokens": 10, "status": 200}\n'
)
ROUTER_LOG = (
    '{"event": "router.started", "timestamp": "2030-01-01T09:59:00Z", "service": "router"}\n'
    '{"event": "request.ended", "timestamp": "2030-01-01T10:00:09Z", "model": "a", "seconds": 9.0, "held_seconds": 4.0,'
    ' "status": 200}\n'
    '{"event": "request.ended", "timestamp": "2030-01-01T10:00:10Z", "model": "a", "seconds": 7.0, "held_seconds": 7.0,'
    ' "status": 503}\n'
    '{"event": "request.ended", "timestamp": "2030-01-01T10:00:11Z", "model": "b", "seconds": 1.0, "held_seconds": 0.0,'
    ' "status": 200}\n'
)


def written(folder: Path, text: str, name: str = "some_trace.csv") -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "format_", "arrivals"),
    [
        (AZURE_2023, "azure-llm", [(0.0, "some_trace", 374, 44), (4.314579, "some_trace", 396, 109)]),
        (AZURE_2024, "azure-llm", [(0.0, "some_trace", 2162, 5), (0.007405, "some_trace", 2399, 6)]),
        (MOONCAKE_CSV, "mooncake-csv", [(0.0, "some_trace", 6758, 500), (3.04, "some_trace", 7322, 490)]),
        (MOONCAKE_JSONL, "mooncake-jsonl", [(0.0, "some_trace", 6758, 500), (3.04, "some_trace", 7322, 490)]),
        (MANY, "many-model", [(1.143, "large", 3042, 99), (1.726, "small", 723, 40)]),
        (BURST, "burstgpt", [(5.0, "ChatGPT", 472, 18), (118.0, "GPT-4", 417, 276)]),
        (BURST_NEW, "burstgpt", [(5.0, "ChatGPT", 472, 18)]),
        (GENTD26, "gentd26", [(0.0, "M0", 16, 1280), (7.0, "M1", 1, 380)]),
        (ROUTER_LOG, "router-log", [(0.0, "a", 1, 200), (10.0, "b", 1, 40)]),
        (ACCESS_LOG, "access-log", [(0.0, "a", 7, 9), (2.0, "b", 8, 10)]),
    ],
)
def test_each_format_is_recognised_and_read(
    tmp_path: Path, text: str, format_: str, arrivals: list[tuple[float, str, int, int]]
) -> None:
    trace = load(written(tmp_path, text))
    assert trace.format == format_
    read = list(trace)
    assert [row[1:] for row in read] == [row[1:] for row in arrivals]
    assert [row.at_seconds for row in read] == pytest.approx([row[0] for row in arrivals], abs=1e-5)


def test_an_access_line_of_the_router_has_what_is_read_of_it() -> None:
    line = json.loads(ROUTER_LOG.splitlines()[1])
    assert line.keys() - {"event", "timestamp"} <= ACCESS_FIELDS


def test_a_gzip_file_reads_like_a_plain_one_whatever_its_name(tmp_path: Path) -> None:
    packed = load(written(tmp_path, MANY, "t.csv.gz"))
    renamed = tmp_path / "t.csv"
    renamed.write_bytes(gzip.compress(MANY.encode()))
    assert list(packed) == list(load(renamed)) == list(load(written(tmp_path, MANY, "plain.csv")))
    assert packed.name == "t"


def test_a_part_of_a_trace_begins_at_zero(tmp_path: Path) -> None:
    rows = "".join(f"{second},m,1,1\n" for second in range(100))
    path = written(tmp_path, "arrival_s,model,prompt_tokens,output_tokens\n" + rows)
    assert [row.at_seconds for row in load(path, 40, 3)] == [0, 1, 2]
    assert len(list(load(path, 97))) == 3
    assert list(load(path, 200)) == []


def test_a_trace_can_be_read_again(tmp_path: Path) -> None:
    trace = load(written(tmp_path, MANY))
    assert list(trace) == list(trace)


def test_weights_name_the_heaviest_model_first(tmp_path: Path) -> None:
    text = MANY + "3,small,1,100\n"
    assert load(written(tmp_path, text)).weights() == {"small": 140, "large": 99}


def test_rows_that_are_a_little_late_are_put_in_order(tmp_path: Path) -> None:
    text = "arrival_s,model,prompt_tokens,output_tokens\n2,m,1,1\n1,m,1,1\n3,m,1,1\n"
    assert [row.at_seconds for row in load(written(tmp_path, text))] == [1, 2, 3]


def test_a_row_that_is_much_too_late_is_an_error_with_its_line(tmp_path: Path) -> None:
    rows = "".join(f"{second},m,1,1\n" for second in range(1, 2000))
    text = "arrival_s,model,prompt_tokens,output_tokens\n" + rows + "0,m,1,1\n"
    with pytest.raises(TraceError, match=r"some_trace\.csv:2001: .*; sort the file by time"):
        list(load(written(tmp_path, text)))


def test_a_log_of_a_router_may_be_in_any_order(tmp_path: Path) -> None:
    head, *ended = ROUTER_LOG.splitlines()
    first, _, last = ended
    text = "\n".join([head, *[last] * 1000, first]) + "\n"
    read = list(load(written(tmp_path, text)))
    assert [(row.at_seconds, row.model) for row in read[:2]] == [(0.0, "a"), (10.0, "b")]
    assert len(read) == 1001


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = written(tmp_path, MANY + "".join(f"{second},m,1,1\n" for second in range(2, 5000)) + "this is no row\n")
    assert len(list(itertools.islice(load(path), 10))) == 10
    assert len(list(load(path, 0, 1000))) == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv:1: the file is empty"),
        (
            "a,b\n1,2\n",
            r"t\.csv:1: no known trace has the columns a, b; known formats: access-log, azure-llm, burstgpt",
        ),
        ('{"a": 1}\n', r"t\.csv:1: no known trace has the columns a;"),
        (MANY + "x,m,1,1\n", r"t\.csv:4: arrival_s is 'x', not a number; correct or remove the row"),
        (MANY + ",m,1,1\n", r"t\.csv:4: arrival_s has no value; correct or remove the row"),
        (
            '{"time": null, "model": "m", "prompt_tokens": 1, "output_tokens": 1}\n',
            r"t\.csv:1: time has no value; correct or remove the row",
        ),
        (MANY + "-1,m,1,1\n", r"t\.csv:4: arrival_s is '-1', which is negative"),
        (MANY + "nan,m,1,1\n", r"t\.csv:4: arrival_s is 'nan'"),
        (MANY + "3,,1,1\n", r"t\.csv:4: model is empty"),
        (MANY + "3,a\0b,1,1\n", r"t\.csv:4: model is 'a\\x00b', which cannot be printed; correct"),
        (MANY + "3,m,1,1e300\n", r"t\.csv:4: output_tokens is '1e300', more than any model reads or writes; correct"),
        (MANY + "1700000000,m,1,1\n", r"t\.csv:4: 1700000000 s are later than any request; write seconds since the"),
        (
            '{"time": 1700000000000, "model": "m", "prompt_tokens": 1, "output_tokens": 1}\n',
            r"t\.csv:1: 1700000000000 s are later than any request; write seconds",
        ),
        (MANY + "3,m,1\n", r"t\.csv:4: 3 fields under 4 columns; is the file cut off"),
        (AZURE_2023 + "yesterday,1,1\n", r"t\.csv:4: 'yesterday' is not a time"),
        (MOONCAKE_JSONL + '{"timestamp": 1\n', r"t\.csv:3: the line is not a JSON object"),
        (MOONCAKE_JSONL + '{"timestamp": 1}\n', r"t\.csv:3: input_length is missing"),
    ],
)
def test_an_unreadable_row_is_reported_with_file_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text, "t.csv")
    with pytest.raises(TraceError, match=message):
        list(load(path))


def test_a_missing_and_a_torn_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no such file; check the path"):
        load(tmp_path / "nowhere.csv")
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress((MANY + "2,m,1,1\n" * 5000).encode())[:-10])
    with pytest.raises(TraceError, match="cannot be read"):
        list(load(torn))


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared traces are not on this machine")
def test_the_real_files_read() -> None:
    found = {path.name: load(path) for path in REAL.glob("*.csv.gz")}
    assert found["azure_llm_2023_code.csv.gz"].format == "azure-llm"
    assert sum(1 for _ in found["azure_llm_2023_code.csv.gz"]) == 8819
    assert sum(1 for _ in found["mooncake_synthetic.csv.gz"]) == 3993
    six_hours = load(REAL / "derived_servegen_10seats_24h.csv.gz", 0, 6 * 3600)
    assert sum(1 for _ in six_hours) == 10006
    assert all(isinstance(arrival, Arrival) for arrival in six_hours)


def test_a_gentd26_request_takes_as_long_as_its_image_did(tmp_path: Path) -> None:
    first = next(iter(load(written(tmp_path, GENTD26))))
    assert service_seconds(first.prompt_tokens, first.output_tokens) == pytest.approx(32.0, rel=0.001)
