"""Files and batches through the official client: shapes, states, paging, errors."""

import json

import openai
import pytest
from helpers import planning_cases
from helpers.servers import flags, request, serving

from flexgen_h2o import LLM


def prompts(count: int) -> list[str]:
    return [" ".join(f"w{3 + (number * 7 + i) % 90}" for i in range(2 + number * 5 % 11))
            for number in range(count)]


def greedy(count: int, **body) -> list[dict]:
    return [request(f"r{number}", prompt=prompt, **({"temperature": 0, "max_tokens": 5} | body))
            for number, prompt in enumerate(prompts(count))]


def test_batch_answers_equal_those_of_generate(served, words_model):
    chat = request("chat", "/v1/chat/completions", max_tokens=2, temperature=0,
                   messages=[{"role": "user", "content": "w5"}])
    lines = [*greedy(20), request("many", prompt=[[5, 6], [7]], n=2, seed=9, max_tokens=3),
             request("bad", prompt="w3", tools=[1]), chat | {"custom_id": "url"}]
    created = served.batch(lines, metadata={"who": "me"})
    assert (created.status, created.object) == ("validating", "batch")
    batch = served.wait(created.id)
    assert batch.status == "completed" and batch.metadata == {"who": "me"}
    assert (batch.request_counts.total, batch.request_counts.completed,
            batch.request_counts.failed) == (23, 21, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    choices = {line["custom_id"]: line["response"]["body"]["choices"]
               for line in served.lines(batch.output_file_id)}
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        outputs = llm.generate(prompts(20), max_new_tokens=5)
    assert {name: choices[name][0]["text"] for name in choices if name != "many"} == {
        f"r{number}": output.text for number, output in enumerate(outputs)}
    assert len({choice["text"] for choice in choices["many"]}) == 4
    errors = {line["custom_id"]: line["response"]["body"]["error"]
              for line in served.lines(batch.error_file_id)}
    assert (errors["bad"]["param"], errors["url"]["code"]) == ("tools", "invalid_url")
    kinds = {file.id: file.purpose for file in served.openai.files.list()}
    assert [kinds[id] for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            ] == ["batch", "batch_output", "batch_output"]
    batch = served.wait(served.batch([chat], "/v1/chat/completions").id)
    (line,) = served.lines(batch.output_file_id)
    assert line["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert line["response"]["body"]["model"] == "tiny"


def test_files_are_listed_in_pages_and_deleted(served):
    ids = [served.upload([request(str(number), prompt="w3")]) for number in range(5)]
    client = served.openai
    page = client.files.list(limit=2, purpose="batch")
    assert [file.id for file in page.data] == ids[:2:-1] and page.has_more
    listed = [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")]
    assert [id for id in listed if id in ids] == ids
    file = client.files.retrieve(ids[0])
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    assert json.loads(client.files.content(ids[0]).text)["custom_id"] == "0"
    for id in ids:
        assert client.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(ids[0])
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])


def test_file_names_are_only_text(served):
    name = "../../etc/pass\"wd\n.jsonl"
    file = served.openai.files.create(file=(name, b"{}"), purpose="batch")
    assert ".." not in file.id
    content = served.http.get(f"/v1/files/{file.id}/content")
    assert content.content == b"{}" and "etc" not in content.headers["content-disposition"]
    assert served.http.get("/v1/files/..%2fserve.db/content").status_code == 404


def test_batches_are_listed_newest_first(served):
    ids = [served.batch([request("a", prompt="w3", max_tokens=1)]).id for _ in range(3)]
    page = served.openai.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
    assert [batch.id for batch in served.openai.batches.list(limit=2)][:3] == ids[::-1]
    for id in ids:
        assert served.wait(id).status == "completed"


@pytest.mark.parametrize("lines, code", [
    (["{broken\n"], "invalid_json_line"), ([{"body": {}}], "missing_required_parameter"),
    (["\n\n"], "invalid_file"),
    ([request("a", prompt="w3"), request("a", prompt="w4")], "duplicate_custom_id")])
def test_invalid_input_fails_the_batch(served, lines, code):
    batch = served.wait(served.batch(lines).id)
    assert batch.status == "failed" and batch.failed_at
    assert batch.errors.data[0].code == code
    assert batch.output_file_id is batch.error_file_id is None


@pytest.mark.parametrize("changes, param", [
    ({"endpoint": "/v1/embeddings"}, "endpoint"), ({"metadata": {"a": 1}}, "metadata"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"input_file_id": "file-none"}, "input_file_id"),
    ({"output_expires_after": {"seconds": 1}}, "output_expires_after")])
def test_invalid_batches_are_refused(served, changes, param):
    fields = {"input_file_id": served.upload([request("a", prompt="w3")]),
              "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = served.http.post("/v1/batches", json=fields | changes)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("form, param", [
    ({"data": {"purpose": "batch"}, "files": {}}, "file"),
    ({"data": {"purpose": "vision"}, "files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file"),
    ({"data": {"purpose": "batch", "expires_after[seconds]": "1"}, "files": {"file": b"x"}},
     "expires_after[seconds]")])
def test_invalid_uploads_are_refused(served, form, param):
    answer = served.http.post("/v1/files", **form)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_cancelled_batch_keeps_its_answers(served):
    batch = served.batch(greedy(60, max_tokens=64, ignore_eos=True))
    served.wait(batch.id, "in_progress")
    with pytest.raises(openai.ConflictError):
        served.openai.files.delete(batch.input_file_id)
    assert served.openai.batches.cancel(batch.id).status == "cancelling"
    ended = served.wait(batch.id)
    assert ended.status == "cancelled" and ended.cancelled_at
    done = served.lines(ended.output_file_id) if ended.output_file_id else []
    left = served.lines(ended.error_file_id)
    assert len(done) + len(left) == 60
    assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        served.openai.batches.cancel(batch.id)
    assert served.openai.files.delete(batch.input_file_id).deleted


def test_an_expired_batch_has_errors(served, monkeypatch):
    monkeypatch.setattr("flexgen_h2o.serving.api._SECONDS", {"m": 0})
    batch = served.http.post("/v1/batches", json={
        "input_file_id": served.upload(greedy(9)), "endpoint": "/v1/completions",
        "completion_window": "1m"}).json()
    ended = served.wait(batch["id"])
    assert ended.status == "expired" and ended.expired_at
    assert {line["error"]["code"] for line in served.lines(ended.error_file_id)} == {
        "batch_expired"}


def test_a_young_batch_does_not_wait_for_an_old_one(words_model, tmp_path):
    with serving(flags(words_model, tmp_path, "--gpu-batch-size", "2")) as served:
        old = served.batch(greedy(150, max_tokens=16, ignore_eos=True))
        served.wait(old.id, "in_progress")
        young = served.wait(served.batch(greedy(3)).id)
        assert young.status == "completed"
        assert served.openai.batches.retrieve(old.id).status == "in_progress"
        served.openai.batches.cancel(old.id)
        served.wait(old.id)


def test_too_many_batches_are_refused(served, monkeypatch):
    monkeypatch.setattr("flexgen_h2o.serving.api.MAX_ACTIVE_BATCHES", 0)
    with pytest.raises(openai.RateLimitError) as error:
        served.batch([request("a", prompt="w3")])
    assert int(error.value.response.headers["retry-after"]) > 0


def test_auto_plan_serves(words_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flexgen_h2o.planning.calibrate.load_or_calibrate",
                        lambda *_, **__: planning_cases.CPU)
    with serving(flags(words_model, tmp_path, "--percent", "auto")) as served:
        assert served.wait(served.batch(greedy(2)).id).request_counts.completed == 2
    assert "tokens/s" in capsys.readouterr().out
