"""Build everything for the offline demo: world, tokenizer, corpus, SFT and RL data, and a tiny model.

`build` writes OUT/{corpus, sft_train, sft_valid, rl_train, rl_valid, test}.jsonl and OUT/model: a 2-layer Qwen3 with
tokenizer and chat template, which transformers and vLLM can load. The same task and seed give the same files. The
model's weights depend, by rounding, on the number of processes under torchrun.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from arpo.protocol.tags import PAPER_TOOLS, reserved_tags
from arpo.tools.search.bm25 import Bm25Index
from arpo.tools.search.passages import format_passages
from extras.demo import hard as demo_hard
from extras.demo import long as demo_long
from extras.demo import notes as demo_notes
from extras.demo import world as demo_world
from extras.demo.hard import HardTrace, HardWorld
from extras.demo.long import FirstWorld, LongTrace, LongWorld, SilentWorld, UnreadyWorld
from extras.demo.notes import NEXT_CONTEXT, NOTES, NotesTrace, NotesWorld
from extras.demo.world import Demonstrator, Question, Trace, World

# Task -> its world, and how its demonstrator writes one trajectory.
TASKS: dict[str, tuple[type[World], type[Trace]]] = {
    "plain": (World, Trace),
    "hard": (HardWorld, HardTrace),
    "long": (LongWorld, LongTrace),
    "long_silent": (SilentWorld, LongTrace),
    "long_unready": (UnreadyWorld, LongTrace),
    "long_first": (FirstWorld, LongTrace),
    "notes": (NotesWorld, NotesTrace),
}
NUM_TRACES = {"sft_train": 20000, "sft_valid": 200}  # configs/demo_sft.yaml reads each one once
NUM_QUESTIONS = {"rl_train": 2000, "rl_valid": 100, "test": 400}
NUM_TOKENIZER_TRACES = 4000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RECALL_STEPS = 250
RECALL_SEQUENCES = 54
RECALL_TOKENS = 64
RECALL_LR = 3e-3


def build(out: Path, seed: int, task: str = "plain") -> None:
    """Write all files into `out`, unless it already has those of this code, task and seed."""
    stamp = {"task": task, "seed": seed, "code": fingerprint()}
    stamp_path = out / "stamp.json"
    if stamp_path.exists() and json.loads(stamp_path.read_text()) == stamp:
        print(f"{out} is up to date")
        return
    started = time.perf_counter()
    transformers_logging.disable_progress_bar()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = [write_data(out, seed, task)] if rank == 0 else [None]
    if num_ranks > 1:
        dist.broadcast_object_list(parts)
    tokenizer, words = parts[0]
    model = build_model(tokenizer, seed)
    teach_recall(model, words, seed, rank, num_ranks)
    if rank == 0:
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        stamp_path.write_text(json.dumps(stamp) + "\n")
        num_parameters = sum(p.numel() for p in model.parameters())
        print(f"model: {num_parameters / 1e6:.2f}M parameters, {len(tokenizer)} tokens")
        print(f"{out}: built in {time.perf_counter() - started:.0f} s")
    if dist.is_initialized():
        dist.destroy_process_group()


def write_data(out: Path, seed: int, task: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Write the data files into `out`. Return the tokenizer, and the tokens that the model learns to copy."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "stamp.json").unlink(missing_ok=True)
    world_type, trace = TASKS[task]
    world = world_type(seed)
    write_jsonl(out / "corpus.jsonl", world.documents())
    demonstrator = searching_demonstrator(out / "corpus.jsonl", trace)
    tokenizer = build_tokenizer(world, demonstrator, seed)
    for name, rows in build_data(world, demonstrator, seed).items():
        write_jsonl(out / f"{name}.jsonl", rows)
        print(f"{out / name}.jsonl: {len(rows)} rows")
    return tokenizer, tokens_in_use(out / "sft_train.jsonl", tokenizer)


def fingerprint() -> str:
    """Return a hash of the code that builds the data."""
    files = (__file__, demo_world.__file__, demo_hard.__file__, demo_long.__file__, demo_notes.__file__)
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()[:16]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- data


def searching_demonstrator(corpus: Path, trace: type[Trace] = Trace) -> Demonstrator:
    """Return a demonstrator that reads the same search results as the policy will: the best passage."""
    index = Bm25Index(str(corpus))

    @cache  # the same few thousand queries come again and again
    def search(query: str) -> str:
        return format_passages(index.search(query, 1), max_passage_chars=1000)

    return Demonstrator(search, trace)


def build_data(world: World, demonstrator: Demonstrator, seed: int) -> dict[str, list[dict]]:
    """Return file stem -> rows. Held-out entities are in rl_valid and test only. Outside SFT no question is
    repeated."""
    rng = random.Random(f"data {seed}")
    files = {
        name: [row for _ in range(n) for row in sft_rows(world.question(rng, "train"), demonstrator, rng)]
        for name, n in NUM_TRACES.items()
    }
    seen = {row["messages"][0]["content"] for rows in files.values() for row in rows}
    for name, n in NUM_QUESTIONS.items():
        part = "train" if name == "rl_train" else "test"
        rows = files[name] = []
        while len(rows) < n:
            question = world.question(rng, part)
            if part == "train" or question.text not in seen:
                seen.add(question.text)
                rows.append(rl_row(question))
    return files


def sft_rows(question: Question, demonstrator: Demonstrator, rng: random.Random) -> list[dict]:
    """Return {"messages": [user, assistant]} for each context. The assistant message includes the <result> spans."""
    rows = []
    user_text = question.text
    for text in demonstrator.trajectory(question, rng).split(NEXT_CONTEXT):
        rows.append({"messages": [{"role": "user", "content": user_text}, {"role": "assistant", "content": text}]})
        user_text = question.text + NOTES + text.rpartition("</result>")[2]
    return rows


def rl_row(question: Question) -> dict:
    return {
        "prompt": question.text,
        "answer": question.answer,
        "data_source": "demo",
        "tools": ["python", "search"],
        "family": question.family,
    }


# ---- tokenizer


def build_tokenizer(world: World, demonstrator: Demonstrator, seed: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with Qwen's chat format, and exactly world.vocab_size tokens.

    Two choices help a tiny model to copy. Digits are split into pairs from the left, so that a number has the same
    tokens in question, call, result and answer. Each tag is one token (not "special", so that decoding keeps it).
    """
    rng = random.Random(f"tokenizer {seed}")
    texts = ["user", "assistant"]
    for _ in range(NUM_TOKENIZER_TRACES):
        question = world.question(rng, "train")
        texts += [m["content"] for row in sft_rows(question, demonstrator, rng) for m in row["messages"]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[*+\-()]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    tags = [f"<{slash}{tag}>" for tag in reserved_tags(PAPER_TOOLS) for slash in ("", "/")] + ["\\boxed{", "}"]
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    num_unmet = sum(all(tag not in text for text in texts) for tag in tags)
    trainer = trainers.BpeTrainer(
        # the trainer counts the tags that occur in the texts itself
        vocab_size=world.vocab_size - len(SPECIAL_TOKENS) - num_unmet,
        special_tokens=[],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == world.vocab_size, len(tokenizer)
    return tokenizer


def tokens_in_use(path: Path, tokenizer: PreTrainedTokenizerFast, num_rows: int = 2000) -> list[int]:
    """Return the tokens in the first rows of an SFT file, about half of the vocabulary."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:num_rows]]
    texts = [message["content"] for row in rows for message in row["messages"]]
    return sorted({token for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in ids})


# ---- model


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3: 2 layers, width 128, about 0.5M parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,  # the published prompts are long in this tokenizer's tokens
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:  # norms stay at 1
            # Rows of the embedding get length 1 too: with Qwen's std of 0.02 the model learns to copy later.
            std = weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * config.num_hidden_layers) ** -0.5
            torch.nn.init.normal_(weight, std=std)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def teach_recall(model: Qwen3ForCausalLM, words: list[int], seed: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Pre-train in miniature, on sequences with a few repeated random phrases.

    To predict the rest of a repeated phrase, the model must learn to copy. Every pretrained LLM can copy, but SFT alone
    does not teach it within minutes: without this stage, numbers and names are not copied and accuracy stays 0. The
    phrases consist of `words` (tokens), and teach nothing of tasks, tools or facts. Ranks share the sequences of a
    step.
    """
    rng = random.Random(f"recall {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECALL_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    model.train()
    for step in range(1, RECALL_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = RECALL_LR * min(1.0, step / 20)
        rows = [recall_sequence(words, RECALL_TOKENS, rng) for _ in range(RECALL_SEQUENCES)]
        input_ids = torch.tensor(rows[rank::num_ranks])  # (B, T)
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits  # (B, T-1, V)
        loss = F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())
        (loss * len(input_ids) / len(rows)).backward()  # this rank's share of the mean
        if num_ranks > 1:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(gradients)
            for p, gradient in zip(
                model.parameters(), gradients.split([p.numel() for p in model.parameters()]), strict=True
            ):
                p.grad = gradient.view_as(p)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 and rank == 0:
            print(f"recall step {step}/{RECALL_STEPS}  loss {loss.item():.3f}", flush=True)


def recall_sequence(words: list[int], num_tokens: int, rng: random.Random) -> list[int]:
    """Return two to five random phrases of two to six tokens, repeated in random order."""
    phrases = [[rng.choice(words) for _ in range(rng.randint(2, 6))] for _ in range(rng.randint(2, 5))]
    sequence: list[int] = []
    while len(sequence) < num_tokens:
        sequence += rng.choice(phrases)
    return sequence[:num_tokens]
