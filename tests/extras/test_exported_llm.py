"""What SFT made of a real model, exported, in transformers. (test_hermes_end_to_end.py runs one in our engine.)

Two conversations, learnt by heart: whatever is lost on the way to another program (a token, the template, the end of a
turn, a weight) shows in what is said there.
"""

from helpers.files import write_jsonl
from helpers.pretrained import pretrained_model
from helpers.ranks import run_script

DIALOGUES = {  # question -> the call that the assistant makes, and what it reads and answers
    "Natalia sold 48 clips in April and half as many in May. How many in all?":
        ("<think>Half of 48 in May.</think><python>print(48/2)</python>",
         " <result>\n24.0\n</result><think>So 48 + 24 together.</think><answer>\\boxed{72}</answer>"),
    "Weng earns $12 an hour. How much did she earn in 50 minutes?":
        ("<think>A sixtieth of 12 a minute.</think><python>print(12/60*50)</python>",
         " <result>\n10.0\n</result><think>That is all.</think><answer>\\boxed{10}</answer>"),
}  # fmt: skip
CONFIG = """
run: {dir: @DIR@/runs, name: sft, num_steps: 20, validate_every: 0, save_every: 0}
model: {path: @MODEL@, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/sft.jsonl, num_conversations_per_step: 2, max_tokens: 256, tools: [python]}
optim: {lr: 2.0e-3, weight_decay: 0.0}
"""


def test_transformers_says_what_the_export_has_learnt(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, model = tmp_path_factory.mktemp("exported"), pretrained_model(tmp_path_factory)
    conversations = [[("user", question), ("assistant", "".join(texts))] for question, texts in DIALOGUES.items()]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations]
    write_jsonl(folder / "sft.jsonl", rows)
    (folder / "config.yaml").write_text(CONFIG.replace("@DIR@", str(folder)).replace("@MODEL@", str(model)))
    run_script("train_sft.py", str(folder / "config.yaml"), ranks=1)
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/sft/hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/sft/hf")
    for question, (call, _) in DIALOGUES.items():
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        said = model.generate(**prompt, do_sample=False, max_new_tokens=len(tokenizer.encode(call)))
        assert tokenizer.decode(said[0, prompt["input_ids"].shape[1] :]) == call
