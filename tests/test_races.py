"""Threads with random delays: transfers, experts and requests give the same results."""

import random
import threading

import pytest
from helpers.delays import SEEDS, random_delays, run_together
from helpers.generation import make_prompts, transformers_tokens
from helpers.servers import flags, request, serving
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.storage.device import PAGE, Device
from flexgen_h2o.storage.disk import AlignedRead, Extent
from flexgen_h2o.storage.transfer import Transfers

DISK = Placement(0, 0, 100)


@pytest.mark.parametrize("seed", SEEDS)
def test_transfers_of_several_threads(tmp_path, seed):
    rounds, nbytes, device, links = 12, 3 * PAGE, Device(), LinkStats()
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * nbytes))
    transfers = Transfers(device, links=links, trace=Trace(enabled=False))
    inner: list[int] = []

    def work(number: int) -> None:
        extent, draw = Extent(path, number * nbytes, nbytes), random.Random(f"{seed} {number}")
        read = AlignedRead(path, extent.offset, nbytes, 0, nbytes)
        source, target = device.host_empty(nbytes), device.host_empty(nbytes)
        for value in range(rounds):
            source.fill_(value + 16 * number)
            written = transfers.submit("stores", lambda queue: queue.disk.write(extent, source))

            def load(queue, written=written):
                written.synchronize()
                queue.disk.read([read], target)
                transfers.submit(draw.choice(["experts", "recalls"]),
                                 lambda queue: inner.append(number))

            loaded = transfers.submit(draw.choice(["loads", "weights"]), load)
            if draw.random() < 0.3:
                transfers.drain()
            transfers.ready(loaded)
            assert target.unique().tolist() == [value + 16 * number]
        transfers.drain()

    with random_delays(seed):
        run_together(*(lambda number=number: work(number) for number in range(4)))
        transfers.drain()
        transfers.close()
    assert sorted(inner) == sorted([*range(4)] * rounds)
    moved = {link: total for link, (total, _) in links.totals().items()}
    assert moved == {"disk->cpu": 4 * rounds * nbytes, "cpu->disk": 4 * rounds * nbytes}


@pytest.mark.parametrize("seed", SEEDS)
def test_experts_and_caches_on_disk_with_delays(tiny_model, tmp_path, seed):
    key = ("qwen2_moe", "mixtral", "gpt_oss")[seed % 3]
    prompts = make_prompts(97, [9, 4, 1, 12, 7])
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, experts=DISK, weights=DISK, cache=DISK,
                    activations=DISK, expert_slots=(None, 1, 3)[seed % 3])
    with random_delays(seed), LLM(str(tiny_model(key).folder), dtype="float32", policy=policy,
                                  offload_dir=tmp_path, weight_cache=None) as llm:
        for _ in range(2):
            tokens = [out.token_ids for out in llm.generate(prompts, max_new_tokens=6,
                                                            eos_token_id=-1)]
            assert tokens == transformers_tokens(tiny_model(key), prompts, 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_server_queues_with_delays(tiny_model, tmp_path, seed):
    model = with_words(tiny_model("llama").folder, tmp_path / "words")
    prompts = [f"w{3 + number} w4" for number in range(8)]
    lines = [request(f"r{number}", prompt=prompt, max_tokens=2 + number, ignore_eos=True,
                     temperature=0)
             for number, prompt in enumerate(prompts)]
    with LLM(model, dtype="float32", device="cpu") as llm:
        texts = [llm.generate([prompt], max_new_tokens=2 + number, eos_token_id=-1)[0].text
                 for number, prompt in enumerate(prompts)]
    before = threading.active_count()
    with random_delays(seed), serving([*flags(model, tmp_path / "data"), "--gpu-batch-size", "3",
                                       "--max-block-seconds", "0.01"]) as served:
        def live(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            for _ in range(5):
                place, way = draw.randrange(len(lines)), draw.random()
                body = {**lines[place]["body"], "stream": way > 0.4}
                with served.http.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
                    if way > 0.8:  # the client leaves
                        next(answer.iter_bytes())
                        continue
                    events = answer.read().decode()
                if way <= 0.4:
                    assert answer.json()["choices"][0]["text"] == texts[place]
                else:
                    assert events.endswith("data: [DONE]\n\n") and '"error"' not in events

        def batch(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            created = served.batch(lines)
            if draw.random() < 0.5:
                served.http.post(f"/v1/batches/{created.id}/cancel")
            ended = served.wait(created.id)
            assert ended.status in ("completed", "cancelled")
            assert ended.request_counts.total == len(lines)
            for line in served.lines(ended.output_file_id) if ended.output_file_id else []:
                text = line["response"]["body"]["choices"][0]["text"]
                assert text == texts[int(line["custom_id"][1:])]
            if ended.status == "completed":
                assert ended.request_counts.completed == len(lines)

        run_together(*((lambda work=work, number=number: work(number))
                       for number, work in enumerate([live, live, live, batch, batch, batch])))
        assert served.http.get("/health").json() == {"status": "ok"}
    assert threading.active_count() <= before
