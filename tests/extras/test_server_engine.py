"""The rollout against an OpenAI-compatible server: a scripted one on loopback, and a real `vllm serve` process.

The scripted one is helpers.scripted_server's. The real one must sample what our own engine samples.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import urllib.request
from contextlib import closing
from dataclasses import replace

import pytest
from helpers.fakes import EchoTool
from helpers.processes import free_port
from helpers.scripted_rollout import ANSWER, CALL, CODEC, SHORT, call_then_answer, play, prompt
from helpers.scripted_server import ScriptedServer
from helpers.vllm_serve import serving
from helpers.web_service import WebService, half_an_answer, never, resets, says

from arpo.config.evals import JudgeConfig
from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from arpo.errors import UserError
from arpo.evals.judge import Judge, JudgeTask
from arpo.options import RolloutConfig
from arpo.protocol import Codec, TagsCodec
from arpo.trajectory import Prompt, StopReason
from extras.server_engine import ServerEngine, completion_request, left_open

NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
KEY = "sk-policy-0123456789"


def connect(url: str, *, model: str = "", max_model_len: int = 650, codec: Codec = CODEC, deadline_s: float = 20.0):
    base = url.removesuffix("/retrieve")
    return ServerEngine(base, model, codec, max_model_len=max_model_len, max_concurrent=4, deadline_s=deadline_s)


@pytest.fixture(params=["vllm", "plain"])
def server(request):
    with ScriptedServer(call_then_answer, plain=request.param == "plain") as running:
        yield running


def test_a_server_gives_the_trajectories_of_the_engine(server):
    """With and without token ids and stop reasons in its answers."""
    engine = connect(server.url)
    groups = play(None, engine=engine, prompts=[prompt("a"), prompt("b"), prompt("c")])
    engine.close()
    expected = play(call_then_answer, prompts=[prompt("a")])[0].trajectories[0]
    for t in (t for group in groups for t in group.trajectories):
        assert (t.token_ids, t.loss_mask, t.text) == (expected.token_ids, expected.loss_mask, expected.text)
        assert t.stop_reason == StopReason.EOS and [call.result for call in t.tool_calls] == ["found"]
        assert list(map(math.isnan, t.rollout_logprobs)) == list(map(bool, t.loss_mask))  # NaN = unknown
    assert engine.num_running == 0 and server.most_running <= 4


def test_requests_say_everything_that_decides_a_turn(server):
    engine = connect(server.url)
    play(None, engine=engine, cfg=replace(SHORT, group_size=2, temperature=0.6, top_p=0.95))
    engine.close()
    bodies = [json.loads(r.body) for r in server.requests if r.path == "/v1/completions"][1:]
    assert len(bodies) == 4 and len({body["seed"] for body in bodies}) == 4
    for body in bodies:
        assert (body["model"], body["temperature"], body["top_p"]) == ("tiny", 0.6, 0.95)
        assert body["stop"] == ["</python>", "</search>"] and body["include_stop_str_in_output"]
        assert body["return_token_ids"] and body["skip_special_tokens"] is False
        assert NEUTRAL.items() <= body.items()
        assert body["prompt"][: len(prompt().token_ids)] == list(prompt().token_ids)
        assert body["max_tokens"] == 600 - (len(body["prompt"]) - len(prompt().token_ids))


@pytest.mark.slow
def test_vllms_server_samples_by_the_request_whatever_stands_in_the_model_folder():
    """vLLM's own request class fills what is missing from the generation_config.json of the model: NeMo-RL #3497,
    lm-evaluation-harness #3154, verl #7270, OpenPipe/ART PR #140, vllm #50767."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    in_the_folder = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.05}
    in_the_folder |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    body = completion_request("tiny", [1, 2], SamplingSpec(max_tokens=9, temperature=0.6, top_p=0.95, seed=1))
    made, alone = (CompletionRequest(**body).to_sampling_params(9, defaults) for defaults in (in_the_folder, {}))
    assert made == alone and (made.temperature, made.top_p, made.repetition_penalty) == (0.6, 0.95, 1.0)
    assert made.top_k < 1 and (made.min_p, made.presence_penalty, made.frequency_penalty) == (0.0, 0.0, 0.0)
    assert CompletionRequest(**body)._DEFAULT_SAMPLING_PARAMS.keys() <= body.keys()


def test_a_turn_without_room_ends_as_length(server):
    engine = connect(server.url)
    [group] = play(None, engine=engine, cfg=replace(SHORT, max_response_tokens=20))
    engine.close()
    assert {t.stop_reason for t in group.trajectories} == {StopReason.LENGTH}


def test_which_tag_is_left_open_decides_the_stop_string_of_a_server_that_cuts_it_off():
    stops = ("</python>", "</search>")
    assert left_open("<think>a</think><search> otters", stops) == "</search>"
    assert left_open("<search>a</search> <result>b</result><python>1", stops) == "</python>"
    assert left_open("<search>a</search>", stops) == "</search>"
    assert left_open("<search>a</search> so it is b", stops) is None
    assert left_open("<answer>b</answer>", stops) is None and left_open("", ()) is None


def test_an_aborted_request_is_forgotten(server):
    engine = connect(server.url)
    engine.submit("a", [1, 2], SamplingSpec(max_tokens=100))
    engine.submit("b", [1, 2], SamplingSpec(max_tokens=100))
    engine.abort(["a", "unknown"])
    finished = []
    while engine.num_running:
        finished += [chunk.request_id for chunk in engine.step() if chunk.finish]
    engine.close()
    assert finished == ["b"]


# ---- what is wrong is said before anything is generated


def test_what_a_server_does_not_serve_is_named(server):
    with pytest.raises(UserError, match=r"eval\.server_model: .* does not serve 'big'; it has tiny"):
        connect(server.url, model="big")
    if not server.plain:
        with pytest.raises(UserError, match="has room for 700 tokens"):
            connect(server.url, max_model_len=701)


def test_an_unreachable_server_is_one_line_with_its_address():
    port = free_port()
    with pytest.raises(UserError, match=rf"eval\.server: cannot reach http://127\.0\.0\.1:{port}/v1/models"):
        connect(f"http://127.0.0.1:{port}")
    with pytest.raises(UserError, match=r"eval\.server: 'localhost:8000' is not an address"):
        connect("localhost:8000")


TWO = {"data": [{"id": "a"}, {"id": "b"}]}
ONE = {"data": [{"id": "a"}]}


@pytest.mark.parametrize(
    "plan, words",
    [
        ([says({"detail": "no"}, 404)], "answers HTTP 404; is it the base URL"),
        ([says({"detail": "no"}, 401)], "answers HTTP 401; set POLICY_API_KEY"),
        ([says("<html>")], "cannot reach"),
        ([half_an_answer], "cannot reach|lists no model"),
        ([says({"data": []})], "lists no model"),
        ([says([1])], "lists no model"),
        *(([says({"data": rows})], "lists no model") for rows in (5, "a", None, {"a": 1}, [5], [{"id": 5}])),
        ([says("[" * 200_000)], "cannot reach .*nested too deep"),
        ([says(" " * (5 << 20))], "cannot reach .*more than 4 MiB"),
        ([says(TWO)], "serves a, b; choose one"),
        ([says(ONE), says({"error": "token ids?"}, 400)], "cannot be used: .*HTTP 400 .*token ids"),
        ([says(ONE), says({"choices": []})], "no choices"),
        ([says(ONE), says({"choices": [{"text": "x", "finish_reason": "error"}]})], "ended with 'error'"),
        ([says(ONE), says({"choices": [{"text": "x", "finish_reason": "stop", "token_ids": "1"}]})], "list of numbers"),
        *(
            (
                [says(ONE), says({"choices": [{"text": "x", "finish_reason": "stop", "token_ids": [3, token]}]})],
                "from 0",
            )
            for token in (-1, 2**31, 2**63, True, 1.0, None)
        ),
        ([says(ONE), says({}, 403)], "refuses the key in POLICY_API_KEY"),
    ],
)
def test_a_server_of_no_use_is_an_error_before_anything_is_generated(plan, words, monkeypatch):
    monkeypatch.setenv("POLICY_API_KEY", KEY)
    with WebService(plan) as running, pytest.raises(UserError, match=words) as error:
        connect(running.url)
    assert KEY not in str(error.value) and "\n" not in str(error.value)
    assert len(running.requests) <= 5


def test_the_key_goes_with_every_request_and_into_no_message(server, monkeypatch):
    monkeypatch.setenv("POLICY_API_KEY", KEY)
    engine = connect(server.url)
    play(None, engine=engine)
    assert {r.headers["Authorization"] for r in server.requests} == {f"Bearer {KEY}"}
    server.then(says({"error": f"bad key {KEY}"}, 400))
    with pytest.raises(UserError, match="HTTP 400") as error:
        play(None, engine=engine)
    engine.close()
    assert KEY not in str(error.value)


def test_a_server_that_hiccups_is_asked_again():
    with ScriptedServer(call_then_answer) as running:
        engine = connect(running.url)
        running.then(resets, says("busy", 503), half_an_answer, running.answer)
        [group] = play(None, engine=engine)
        engine.close()
    assert all(t.text.endswith(ANSWER) and CALL in t.text for t in group.trajectories)


def test_a_server_that_dies_ends_the_run_and_says_that_nothing_is_lost():
    with ScriptedServer(call_then_answer) as running:
        engine = connect(running.url, deadline_s=0.5)
        running.then(never)
        with pytest.raises(UserError, match="what is finished is saved; start the server again, and repeat the comm"):
            play(None, engine=engine)
        engine.close()


# ---- a real vllm serve


@pytest.fixture(scope="module")
def vllm_serve(tiny_model_dir, tmp_path_factory):
    """The address of a `vllm serve` process of the tiny model, whose folder has defaults for sampling in it, as many on
    the Hub do (Qwen2.5-Instruct: 1.05 and 20). vLLM takes them for what a request does not say."""
    model = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "generation_config.json").read_text())
    config |= {"do_sample": True, "repetition_penalty": 1.3, "top_k": 20, "temperature": 0.5, "top_p": 0.8}
    (model / "generation_config.json").write_text(json.dumps(config))
    with serving(model, max_model_len=500) as url:
        yield url


@pytest.mark.slow
def test_vllm_serve_samples_what_our_own_engine_samples(vllm_serve, tiny_model_dir):
    """The same seeds, prompts and tool results: token by token the same trajectories, tool calls included."""
    from transformers import AutoTokenizer

    codec = TagsCodec(AutoTokenizer.from_pretrained(tiny_model_dir))
    messages = [{"role": "user", "content": "who wrote the book?"}]
    prompts = [Prompt(f"p{i}", messages, ["42"], token_ids=tuple(codec.render_prompt(messages))) for i in range(4)]
    cfg = RolloutConfig(group_size=4, max_response_tokens=300, max_result_tokens=60, answer_reserve_tokens=20)
    tools = [EchoTool("search", "the book"), EchoTool("python", "42")]
    how = {"cfg": cfg, "tools": tools, "prompts": prompts, "codec": codec, "seed": 1}

    def played(engine):
        with closing(engine):
            groups = play(None, engine=engine, **how)
        return [t for group in groups for t in group.trajectories]

    with pytest.raises(UserError, match="has room for 500 tokens"):
        connect(vllm_serve, max_model_len=501)
    theirs = played(connect(vllm_serve, max_model_len=500, codec=codec, deadline_s=300))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=16)
    ours = played(Engine(str(tiny_model_dir), engine_cfg, max_model_len=500, seed=0))
    assert any(call.executed for t in ours for call in t.tool_calls)
    assert {t.stop_reason for t in ours} >= {StopReason.EOS, StopReason.LENGTH}
    for a, b in zip(theirs, ours, strict=True):
        assert (a.token_ids, a.loss_mask, a.stop_reason) == (b.token_ids, b.loss_mask, b.stop_reason)


@pytest.mark.slow
def test_its_chat_endpoint_renders_the_prompt_that_we_render(vllm_serve, tiny_model_dir):
    """So a model of ours reads behind other programs what it has learnt to read."""
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who wrote the book?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{vllm_serve}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        read = json.load(reply)["prompt_token_ids"]
    assert read == list(TagsCodec(AutoTokenizer.from_pretrained(tiny_model_dir)).render_prompt(messages))


@pytest.mark.slow
def test_vllm_serve_as_judge(vllm_serve, tmp_path, monkeypatch):
    """A random model gives no verdict; what it said is kept, and read again without it."""
    cfg = JudgeConfig(url=f"{vllm_serve}/v1/chat/completions", model="tiny")
    monkeypatch.setattr("arpo.evals.judge.MAX_TOKENS", 8)
    judge = Judge(cfg, tmp_path / "judge.sqlite", max_tries=1, deadline_s=300.0)
    with pytest.raises(UserError, match=r"^judge\.url: judge: HTTP 400 "):
        judge.probe()  # the prompt does not fit into a context of 500 tokens
    monkeypatch.setattr("arpo.evals.judge.PROMPT", "{question} {references} {prediction}")
    tasks = [JudgeTask(f"who wrote book {i}?", ("42",), str(i)) for i in range(8)]
    verdicts = judge.judge(tasks)
    judge.close()
    assert {verdict.status for verdict in verdicts} == {"unparsable"} and all(verdict.reply for verdict in verdicts)
    gone = Judge(replace(cfg, url="http://127.0.0.1:9/v1"), tmp_path / "judge.sqlite")
    assert gone.judge(tasks) == verdicts
    gone.close()


def test_closing_ends_what_is_in_flight():
    with ScriptedServer(call_then_answer) as running:
        engine = connect(running.url)
        running.then(never)
        engine.submit("a", [1], SamplingSpec(max_tokens=5))
        while not running.num_running:
            assert all(chunk.finish is None for chunk in engine.step())
        engine.close()
        assert engine.num_running == 0 and not engine._thread.is_alive() and not asyncio.all_tasks(engine._loop)
