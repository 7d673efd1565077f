"""What SFT made of a real model, exported: in transformers and in our engine. (test_hermes_end_to_end.py serves one.)

Two conversations, learnt by heart: whatever is lost on the way to another program (a token, the template, the end of a
turn, a weight) shows in what is said there.
"""

import json
from pathlib import Path

import pytest
from helpers.files import write_jsonl
from helpers.pretrained import pretrained_model
from helpers.ranks import run_script

from arpo.evals.records import read_records

CALL = "<think>Half of 48 in May.</think><python>print(48/2)</python>"
ANSWER = "<think>So 48 + 24 together.</think><answer>\\boxed{72}</answer>"
OTHER = "<think>A sixtieth of 12 a minute.</think><python>print(12/60*50)</python>"
OTHER_ANSWER = "<think>That is all.</think><answer>\\boxed{10}</answer>"
DIALOGUES = {  # question -> answer, and the assistant's text
    "Natalia sold 48 clips in April and half as many in May. How many in all?":
        ("72", f"{CALL} <result>\n24.0\n</result>{ANSWER}"),
    "Weng earns $12 an hour. How much did she earn in 50 minutes?":
        ("10", f"{OTHER} <result>\n10.0\n</result>{OTHER_ANSWER}"),
}  # fmt: skip
CONFIG = """
run: {dir: @DIR@/runs}
train_sft:
  run: {name: sft, num_steps: 20, validate_every: 0, save_every: 0}
  model: {path: @MODEL@, compute_dtype: float32, recompute_every_n_layers: 0}
  data: {train: @DIR@/sft.jsonl, num_conversations_per_step: 2, max_tokens: 256, tools: [python]}
  optim: {lr: 2.0e-3, weight_decay: 0.0}
evaluate:
  model: {path: @DIR@/runs/sft/hf}
  engine: {dtype: float32, kv_cache_gib: 0.1, max_num_seqs: 8}
  eval: {files: [@DIR@/questions.jsonl], max_prompt_tokens: 128}
  rollout: {max_response_tokens: 160, max_result_tokens: 40, answer_reserve_tokens: 20, temperature: 0}
  tools: {names: [python]}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with runs/sft, a model that knows both dialogues."""
    folder, model = tmp_path_factory.mktemp("served"), pretrained_model(tmp_path_factory)
    rows = [[("user", question), ("assistant", text)] for question, (_, text) in DIALOGUES.items()]
    write_jsonl(folder / "sft.jsonl", [{"messages": [{"role": r, "content": c} for r, c in row]} for row in rows])
    write_jsonl(folder / "questions.jsonl", [{"question": q, "answer": answer} for q, (answer, _) in DIALOGUES.items()])
    (folder / "config.yaml").write_text(CONFIG.replace("@DIR@", str(folder)).replace("@MODEL@", str(model)))
    run_script("train_sft.py", str(folder / "config.yaml"), ranks=1)
    return folder


def test_transformers_reads_the_export(world):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world / "runs/sft/hf")
    tokenizer = AutoTokenizer.from_pretrained(world / "runs/sft/hf")
    for question, (_, text) in DIALOGUES.items():
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        call = text.partition(" <result>")[0]
        said = model.generate(**prompt, do_sample=False, max_new_tokens=len(tokenizer.encode(call)))
        assert tokenizer.decode(said[0, prompt["input_ids"].shape[1] :]) == call


def test_the_export_calls_its_tool_in_our_engine(world):
    run_script("evaluate.py", str(world / "config.yaml"), "--run.name", "own", ranks=1)
    records = read_records(world / "runs" / "own")
    assert {r.question: r.trajectory.text for r in records} == {q: text for q, (_, text) in DIALOGUES.items()}
    assert [[(call.tag, call.ok) for call in r.trajectory.tool_calls] for r in records] == [[("python", True)]] * 2
    assert json.loads((world / "runs" / "own" / "scores.json").read_text())["questions"]["accuracy"] == 1.0
